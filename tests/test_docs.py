"""What the README and the docs say is true: paths exist, links lead somewhere, examples parse, complete scripts run.

A ```python block that imports weft is a complete script and is run, in a folder of its own, as one process. Other
python blocks are only parsed. ```toml blocks are plans or jobs, and are read as such.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from reference import _marked, refusals

from weft.errors import WeftError
from weft.plan.check import check
from weft.plan.model_refusals import IMAGE_RULES, MODEL_REFUSALS
from weft.plan.plan import SECTIONS
from weft.plan.rules import RULES
from weft.plan.text import parse_plan, read_plan
from weft.training.run.job import parse_job

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ROOMS = ("src", "docs", "tests", "examples", "benchmarks")


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of every fenced block of a language in all pages."""
    found = []
    for name, page in zip(PAGE_NAMES, PAGES, strict=True):
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            line = page.read_text()[: match.start()].count("\n") + 1
            found.append((f"{name}:{line}", match.group(1)))
    return found


PYTHON, TOML = blocks("python"), blocks("toml")
SCRIPTS = [(where, text) for where, text in PYTHON if re.search(r"^import weft|^from weft", text, re.MULTILINE)]


def in_code(text: str) -> list[str]:
    """What stands in backticks, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def test_there_is_something_to_check() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/design.md"} <= set(PAGE_NAMES)
    assert SCRIPTS and TOML


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [target.partition("#")[0] for target in targets if not re.match(r"https?:|mailto:|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_paths_exist(page: Path) -> None:
    """Every path in backticks that begins with a folder of ours; NAME, * and <...> are places for something else."""
    named = [word for word in in_code(page.read_text()) if re.match(rf"({'|'.join(ROOMS)})/[\w./-]*$", word)]
    missing = [word for word in named if "NAME" not in word and not (ROOT / word).exists()]
    assert missing == []
    modules = [word for word in in_code(page.read_text()) if re.fullmatch(r"[a-z_]+/[a-z_]+\.py", word)]
    known = {str(path.relative_to(ROOT / "src" / "weft")) for path in ROOT.glob("src/weft/**/*.py")}
    assert [word for word in modules if word not in known and not (ROOT / word).exists()] == []


def test_the_drawn_house_stands() -> None:
    """Every file in the tree of docs/design.md exists in the room it is drawn in."""
    tree = (ROOT / "docs" / "design.md").read_text().split("src/weft/\n")[1].split("```")[0]
    room, missing = "", []
    for line in tree.splitlines():
        if match := re.match(r"  ([\w/]+)/ ", line):
            assert (ROOT / "src/weft" / match.group(1)).is_dir(), line
            room = match.group(1)
        elif re.match(r"  \w", line):
            room = ""
        missing += [name for name in re.findall(r"\w+\.py", line) if not (ROOT / "src/weft" / room / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert re.findall(r"^[A-Z]+(?:_[A-Z]+)+$|TODO|FIXME|TBD|FIGURE:", page.read_text(), re.MULTILINE) == []


@pytest.mark.parametrize(("where", "text"), PYTHON, ids=[where for where, _ in PYTHON])
def test_python_is_python(where: str, text: str) -> None:
    assert ast.parse(text, filename=where).body


@pytest.mark.sampled(long=3)
@pytest.mark.long
@pytest.mark.parametrize(("where", "text"), SCRIPTS, ids=[where for where, _ in SCRIPTS])
def test_scripts_run(where: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text)
    result = subprocess.run(
        [sys.executable, "-W", "error", "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, f"{where}:\n{result.stderr}"


@pytest.mark.parametrize(("where", "text"), TOML, ids=[where for where, _ in TOML])
def test_toml_is_a_plan_or_a_job(where: str, text: str) -> None:
    tables = tomllib.loads(text)
    if "model" in tables or "steps" in tables:
        parse_job(re.sub(r"^plan = .*$", "", text, flags=re.MULTILINE), source=where)
    else:
        assert tables.keys() <= SECTIONS.keys(), where
        parse_plan(text, source=where)


def test_the_page_of_refusals_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    assert page == refusals(), "run: python docs/reference.py refusals > docs/refusals.md"
    for refusal in (*RULES, *MODEL_REFUSALS, *IMAGE_RULES):
        assert f"\n| {_marked(refusal.combination)} | " in page
    assert not re.search(r"[{}]", page)


def test_every_method_has_its_plan_and_its_page() -> None:
    """A page has a plan of its name, and every plan, also a variant of a method, is named on some page."""
    pages = {page.stem: page.read_text() for page in ROOT.glob("docs/methods/*.md")}
    plans = {plan.stem for plan in ROOT.glob("examples/plans/*.toml")}
    assert pages and pages.keys() <= plans
    assert [plan for plan in plans if not any(f"examples/plans/{plan}.toml" in text for text in pages.values())] == []


@pytest.mark.parametrize("plan", sorted(ROOT.glob("examples/plans/*.toml")), ids=lambda path: path.name)
def test_example_plans_can_run(plan: Path) -> None:
    try:
        example = read_plan(plan)
    except WeftError as error:
        pytest.fail(str(error))
    assert check(example, num_ranks=example.axes.num_ranks, global_batch=64) == []
    assert plan.read_text().startswith("# ")
