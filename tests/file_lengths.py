"""Print the lines of every file of src/weft, longest first, and fail if one is over the limit.

A file holds one idea; one that needs more than 400 lines holds two.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "weft"
MAX_LINES = 400


def file_lengths(folder: Path) -> list[tuple[int, str]]:
    """(lines, path) of every Python file under the folder, longest first."""
    files = [(len(path.read_text().splitlines()), str(path.relative_to(folder))) for path in folder.rglob("*.py")]
    return sorted(files, key=lambda entry: (-entry[0], entry[1]))


def main() -> int:
    files = file_lengths(SOURCE)
    for lines, name in files:
        print(f"{lines:6}  {name}" + (f"  (over {MAX_LINES})" if lines > MAX_LINES else ""))
    print(f"{sum(lines for lines, _ in files):6}  in {len(files)} files")
    return int(any(lines > MAX_LINES for lines, _ in files))


if __name__ == "__main__":
    sys.exit(main())
