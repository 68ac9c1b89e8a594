"""Every refused combination of plan values with a kind of model, batch or machine.

Models that weft cannot analyse (an unknown layer, a missing example) are not here: no value of the plan is wrong then.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.plan import in_process_refusals
from weft.plan.fields import toml
from weft.plan.plan import Plan, value_at
from weft.plan.refusals import Refusal, Rule


def image_problems(plan: Plan) -> Iterator[str]:
    """Every value of this plan that does not go with images, which the ring axis splits by rows."""
    for rule in IMAGE_RULES:
        yield from rule.problems(plan)


# --- batches and machines ---------------------------------------------------------------------------------------------

SMALL_BATCH = Refusal(
    combination="a global batch smaller than [axes] replicate × data",
    why="a global batch of {global_batch} is smaller than the {data_ranks} data ranks (replicate "
    "{axes.replicate:value} × data {axes.data:value}), so some rank would never have a sample",
    remedy="use a global batch of at least {data_ranks}, or fewer ranks along data",
)
UNEVEN_STATISTICS = Refusal(
    combination='BatchNorm with [data] buffers = "broadcast" or "local", and a batch that parts do not divide',
    why="each rank normalises by its own samples with {data.buffers}, so parts must be equal, and a global batch of "
    "{global_batch} does not divide by {data_ranks} data ranks × {step.microbatches:value} microbatches = {parts}",
    remedy='use a global batch of {sizes}, or [data] buffers = "synchronise"',
)
SHARED_MEMORY_ON_A_DEVICE = Refusal(
    combination='[comm] transport = "shared" on a GPU',
    why='[comm] transport = "shared" is for tensors in host memory, and this rank computes on {device}',
    remedy='use "auto" or "c10d"',
)

CODEC_OF_COMPLEX_WEIGHTS = Refusal(
    combination="[codec] name with complex weights",
    why='{codec.name} makes messages of real numbers, and "{name}" is complex',
    remedy='set [codec] name = "none", or store real and imaginary parts',
)

DGC_OPTIMIZER = Refusal(
    combination='[codec] name = "dgc" with another optimizer than torch.optim.SGD, or with dampening or maximize',
    why="{codec.name} takes over the momentum of torch.optim.SGD, and this optimizer is {found}",
    remedy='use torch.optim.SGD(momentum=...) without dampening and maximize, or another codec such as "topk"',
)
CODEC_OF_16_BIT_WEIGHTS = Refusal(
    combination="[codec] name with weights that the model itself has in 16 bits",
    why='{codec.name} adds what it did not send to later values, and "{name}" is {dtype}, where such small terms are '
    "rounded away",
    remedy='make the model in float32 and set [precision] compute = "bf16"',
)
PULL_OF_16_BIT_WEIGHTS = Refusal(
    combination="[server] pull with weights that the model itself has in 16 bits",
    why='{server.pull} rounds what servers send of their weights, and "{name}" is {dtype} there already',
    remedy='leave it out, or make the model in float32 and set [precision] compute = "bf16"',
)
CODEC_OF_REPEATED_ROWS = Refusal(
    combination="[codec] name with [axes] tensor of which several ranks hold some rows of a weight, where these are "
    "exchanged by each for itself",
    why="{codec.name} chooses among all that a rank holds, and with {axes.tensor} several ranks hold some rows of "
    '"{name}" beside others: copies of these rows would drift apart',
    remedy="set [axes] tensor to a divisor of the number of key and value heads",
)
MORE_FRAGMENTS_THAN_BLOCKS = Refusal(
    combination="[data] fragments larger than the model's number of blocks",
    why="{data.fragments} needs as many blocks, and the model has {num_blocks}",
    remedy="set [data] fragments to {most} or less, or give the model a weft_blueprint() that names its blocks",
)
NOTHING_TO_COMPRESS = Refusal(
    combination="[codec] name with a model of which it would compress no tensor",
    why="{codec.name} compresses no tensor of this model: {found}",
    remedy="{advice}",
)
NOTHING_SENT = Refusal(
    combination="[codec] density so small that nothing would be sent",
    why='{codec.density} of the largest tensor, "{name}" with {numel} elements, is {share:.3g} entries, so nothing '
    "would be sent of any tensor",
    remedy="set [codec] density to {least:.1g} or more",
)

# --- models without blocks, and models compiled as a whole ------------------------------------------------------------

BLOCKS_NEEDED = Refusal(
    combination="[axes] pipeline > 1, [recompute] policy, [compile] blocks or [tensor] sequence with a model that has "
    "no list of blocks",
    why="{asked} needs a model with a list of blocks, and none was found",
    remedy="put its layers into an nn.Sequential or nn.ModuleList, give it a weft_blueprint() that names them, or set "
    "{instead}",
)
COMPILED_AS_A_WHOLE = Refusal(
    combination="[axes] pipeline, tensor, ring or ulysses > 1 with a model that went through torch.compile",
    why="a model compiled as a whole cannot be cut",
    remedy="give the model itself and set [compile] blocks = true",
)

# --- losses that a model makes itself ---------------------------------------------------------------------------------

BALANCE_LOSS_LEFT_OUT = Refusal(
    combination='loss = "cross-entropy" with output_router_logits = true (mixture of experts)',
    why="{model} has output_router_logits = true, which asks for a loss that balances its experts, and weft's "
    "cross-entropy is that of the logits alone",
    remedy="set output_router_logits = false to train without it, or give a loss of your own that adds "
    "output.aux_loss, which needs the whole batch on one data rank and in one microbatch",
)
BALANCE_LOSS_OF_PARTS = Refusal(
    combination="output_router_logits = true (mixture of experts) with a batch in several parts ([axes] data, "
    "replicate, ring, ulysses or [step] microbatches > 1)",
    why="{model} has output_router_logits = true; its output.aux_loss is a product of two means over the batch, and "
    "{parts} parts of a batch, of which each makes its own, do not add up to that of the whole",
    remedy="set output_router_logits = false, or those axes and microbatches to 1",
)

# --- pipelines --------------------------------------------------------------------------------------------------------

VERSIONS_OF_MASTERS = Refusal(
    combination='[pipeline] schedule = "pipedream" or "2bw" with 16-bit parameters or [data] offload',
    why="{pipeline.schedule} keeps weight versions that the optimizer updates in place, and a model with 16-bit "
    "parameters, or [data] offload, needs a master copy beside them",
    remedy='build the model in float32 and leave offload out, or use "1f1b"',
)
PIPEDREAM_WITH_SHARED_WEIGHTS = Refusal(
    combination='[pipeline] schedule = "pipedream" with a weight that several stages share',
    why='[pipeline] schedule = "pipedream" updates every stage by itself, and "{name}" is on the stages of ranks '
    "{ranks} of the pipeline",
    remedy='untie it (a GPT: tied = false), or use "2bw" or "1f1b"',
)
STATISTICS_ON_SEVERAL_STAGES = Refusal(
    combination="[axes] pipeline > 1 with a BatchNorm that several stages call",
    why='"{name}" holds a BatchNorm and is called on stages {stages}, which would each keep statistics of their own',
    remedy="use another norm, a BatchNorm for each call, or cut so that one stage calls it",
)
BUFFERS_OF_EVERY_STAGE = Refusal(
    combination="[axes] pipeline > 1 with a model that writes into a buffer outside of its blocks",
    why='the model\'s own code, outside its blocks, writes into its buffer "{name}", which every stage of a pipeline '
    "has",
    remedy="move that code and the buffer into a block, or train without a pipeline",
)
BLOCKS_THAT_ASK_FOR_VALUES = Refusal(
    combination="[axes] pipeline > 1 with a block whose shapes depend on values",
    why='"{name}" cannot be followed without values ({error}); a pipeline needs to know the shapes a block returns '
    "before it runs",
    remedy="decide by shapes, not by values, or train without a pipeline",
)
VALUES_BESIDE_OUTPUTS = Refusal(
    combination="[axes] pipeline > 1 with values that a block hands on beside what it returns",
    why='"{name}" makes a tensor that the model uses afterwards, but does not return it: it goes through a hook inside '
    "the block, an attribute, or a list or dict among the block's arguments, which other stages of a pipeline do not "
    "have",
    remedy="let the block return it (what a whole block returns may be collected, also by a hook on the block), or "
    "train without a pipeline",
)
LOSS_OF_OTHER_STAGES = Refusal(
    combination="[axes] pipeline > 1 with a loss that uses values which the model keeps beside its output",
    why="the loss uses a value of another stage that the model does not return: it found it in an attribute, a list or "
    "a dict that was filled during the forward pass",
    remedy="let the model return everything that the loss needs, in a tuple or dict, or train without a pipeline",
)
CUT_CHANGES_THE_MODEL = Refusal(
    combination="[axes] pipeline > 1 with a model that computes something else when it is cut, as the example shows",
    why="cut into the stages of {axes.pipeline}, the model computes something else than the whole one, as a "
    "pass of the example shows",
    remedy="let blocks return whatever later blocks use, instead of keeping it, and let no function of your own run "
    "blocks without gradients and their backward pass by itself (a checkpoint of another library; torch's is fine); or "
    "train without a pipeline",
)
CUT_MODEL_FAILS = Refusal(
    combination="[axes] pipeline > 1 with a model that fails when it is cut, as the example shows",
    why="cut into the stages of {axes.pipeline}, the model fails on the example ({error})",
    remedy="let blocks return whatever later blocks use, instead of keeping it, and let a checkpoint hold one block at "
    "most; or train without a pipeline",
)

# --- the tensor axis --------------------------------------------------------------------------------------------------

AUTOCAST_OF_SHARES = Refusal(
    combination="[axes] tensor > 1 with a model that uses torch.autocast in its own code",
    why="the model's code casts by itself (torch.autocast), which layers split over [axes] tensor do not follow",
    remedy='leave it out and set [precision] compute = "bf16" or "fp16"',
)
SHARES_OF_TIED_WEIGHTS = Refusal(
    combination="[axes] tensor > 1 with a weight that has two names, to be cut in two ways",
    why="{names} are one parameter, and are not to be cut alike over [axes] tensor",
    remedy="untie them, or declare the same cut for each in weft_blueprint()",
)
TOO_FEW_UNITS = Refusal(
    combination="[axes] tensor with a layer that has fewer heads, channels or rows",
    why="{name} has {units} to share out (heads, channels or rows), too few for [axes] tensor = {num_ranks}",
    remedy="{num_units} ranks at most can split it",
)
STATISTICS_OF_SOME_TOKENS = Refusal(
    combination="[tensor] sequence = true with blocks that normalise over samples (BatchNorm, InstanceNorm)",
    why='"{name}" normalises over the samples and tokens it sees, and with [tensor] sequence = true a rank sees only '
    "its own",
    remedy="set sequence = false, or use another norm in the blocks",
)
TOKENS_FLATTENED = Refusal(
    combination="[tensor] sequence = true with a block that joins samples and tokens into one dim (OPT)",
    why="a layer that is split over the tensor axis is given a tensor of {shape} inside of a block: with [tensor] "
    "sequence = true it must be (samples, tokens, features), of which a rank has some tokens",
    remedy="keep samples and tokens apart in the model's code, or set sequence = false",
)
WEIGHTS_INSIDE_AND_OUTSIDE = Refusal(
    combination="[tensor] sequence = true with a weight that is shared between a block and the rest",
    why='"{name}" belongs to a block and to the model outside of its blocks; with [tensor] sequence = true its '
    "gradients of the two differ in kind",
    remedy="give each its own, or set sequence = false",
)
BLOCKS_LEFT_OUT_AT_RANDOM = Refusal(
    combination="[tensor] sequence = true, [axes] ring, ulysses or pipeline > 1 with blocks left out at random (layer "
    "drop)",
    why='"{module}" has {name} = {value}, and leaves out blocks at random; with {asked} {reason}',
    remedy="set {name} = 0, or {instead}",
)

# --- sequences --------------------------------------------------------------------------------------------------------

TOO_FEW_HEADS = Refusal(
    combination="[axes] ulysses with fewer heads",
    why="attention has {heads} on this rank, too few for [axes] ulysses = {num_ranks}, which gives every rank at least "
    "one",
    remedy="use ulysses = {possible}, ring = {ring}",
)
ATTENTION_THAT_DROPS = Refusal(
    combination="[axes] ring or ulysses > 1 with dropout inside attention",
    why="attention drops {dropout:g} of its weights, which weft does not do over several ranks",
    remedy="set the model's attention dropout to 0, or [axes] ring and ulysses to 1",
)
SOFT_CAPS_OF_WHOLE_ROWS = Refusal(
    combination='[sequence] variant = "ring-self-attention" with a model that caps its attention scores (Gemma 2)',
    why='attention caps its scores at {softcap:g}, and [sequence] variant = "{variant}" keeps no scores, which the '
    "gradient of the cap needs",
    remedy='use variant = "ring", or a model without attn_logit_softcapping',
)
CROSS_ATTENTION = Refusal(
    combination="[axes] ring or ulysses > 1 with cross-attention (an encoder and a decoder)",
    why="attention of {num_queries} queries to {num_keys} keys: with [axes] ring or ulysses > 1 weft splits "
    "self-attention only, where both are as many",
    remedy="set [axes] ring and ulysses to 1 for models with cross-attention",
)
MASKS_OF_ITS_OWN = Refusal(
    combination="[axes] ring or ulysses > 1 with a mask that the model makes itself, other than causal or padding",
    why="the model gives attention a mask of {shape} ({dtype}) that it made from the {num_tokens} tokens of this rank, "
    "and weft cannot know what it says of other ranks' tokens",
    remedy="let the model say is_causal=True instead, or give padding as a bool mask (samples, 1, 1, tokens)",
)
TOKENS_OF_ITS_OWN = Refusal(
    combination="[axes] ring or ulysses > 1 with a model that adds tokens or leaves some out",
    why="attention of {num_tokens} tokens where this rank has {num_mine}: the model adds tokens of its own, or leaves "
    "some out, which ranks that share a sequence would each do for their part",
    remedy="set [axes] ring and ulysses to 1, or [tensor] sequence = false where that is on",
)
LOSS_OVER_TOKENS = Refusal(
    combination="[axes] ring or ulysses > 1 with a loss of a token that depends on other tokens",
    why="the loss of some tokens and that of the others do not add up to the loss of all: {whole:.6g} for all of them "
    "against {parts:.6g}. So ranks that share a sequence cannot each compute it on their own tokens",
    remedy="let every token's part of it depend on that token only (shift targets in the data, take means over "
    "tokens), return (sum, count) where it divides by a number of its own, or set [axes] ring and ulysses to 1",
)

# --- losses -----------------------------------------------------------------------------------------------------------

LOSS_OF_PARTS = Refusal(
    combination="[axes] data or replicate > 1, or [step] microbatches > 1, with a loss that is no mean over targets",
    why="the loss of a batch is not the mean of the losses of its parts, weighted by their numbers of targets (those "
    "other than -100 where they are integers, else samples): {seen}. So data ranks and microbatches ([axes] data = "
    "{axes.data:value}, {step.microbatches}) would train another loss than one process",
    remedy="let it return (sum, count): the sum over what it averages, and the number that it divides by "
    "(docs/losses.md). A loss that compares samples with each other gets those of all ranks from weft.gather_batch, "
    "with microbatches = 1",
)
LOSS_OF_SOME_TARGETS = Refusal(
    combination="[axes] data or replicate > 1, or [step] microbatches > 1, with a loss that is a mean over targets "
    "only while none of them is -100, and one is",
    why="a target is -100, and the loss is not a mean over the other targets: with some left out, the losses of parts "
    "of a batch do not add up to that of the whole ([axes] data = {axes.data:value}, {step.microbatches})",
    remedy="let it return (sum, count), and shift targets in the data, not in the loss (docs/losses.md)",
)
COUNTS_OF_PARTS = Refusal(
    combination="[axes] data or replicate > 1, or [step] microbatches > 1, with (sum, count) that do not add up",
    why="the sums and counts that the loss returns for parts of a batch do not add up to those of the whole: {seen}. "
    "So data ranks and microbatches ([axes] data = {axes.data:value}, {step.microbatches}) would train another loss "
    "than one process",
    remedy="return the plain sum and the number of its terms, not a mean or a constant (docs/losses.md). A loss that "
    "compares samples with each other gets those of all ranks from weft.gather_batch, with microbatches = 1",
)
LOSS_FAILED = Refusal(
    combination="a loss that fails on some ranks' parts of a batch, and not on others'",
    why="the loss failed on {ranks} with its part of the batch ({error})",
    remedy="it is called with the samples of one data rank and microbatch at a time; if its targets are indices into "
    "the whole batch, gather the outputs of all ranks with weft.gather_batch (docs/losses.md)",
)
GATHERED_MICROBATCHES = Refusal(
    combination="[step] microbatches > 1 with a loss that calls weft.gather_batch",
    why="the loss calls weft.gather_batch, which needs all samples of the batch at once, and {step.microbatches} "
    "computes a part of them at a time",
    remedy='set [step] microbatches = 1; for memory, [recompute] policy = "full" or more data ranks',
)
GATHERED_TOKENS = Refusal(
    combination="[axes] ring or ulysses > 1 with a loss that calls weft.gather_batch",
    why="the loss calls weft.gather_batch, which joins whole samples, and with {axes.ring} and {axes.ulysses} each "
    "rank has only a part of every sample",
    remedy="set [axes] ring and ulysses to 1",
)

# --- images split by rows ---------------------------------------------------------------------------------------------


def _image_rule(path: str, only: object, why: str, remedy: str) -> Rule:
    section, name = path.split(".")
    return Rule(
        combination=f"[axes] ring > 1 with images and [{section}] {name} other than {toml(only)}",
        why=f"{{{path}}} does not go with images, which [axes] ring splits by rows{why}",
        remedy=remedy,
        broken=lambda plan, _: value_at(plan, path) != only,
    )


IMAGE_RULES: tuple[Rule, ...] = (
    _image_rule("axes.ulysses", 1, " and which have no heads to split", "give its ranks to ring"),
    _image_rule("axes.pipeline", 1, ": stages pass on whole activations", "give its ranks to ring or data"),
    _image_rule("axes.tensor", 1, ": layers split over both are not built", "give its ranks to ring or data"),
    _image_rule("sequence.layout", "zigzag", " in one way only", "leave it out"),
    _image_rule("sequence.variant", "ring", " in one way only", "leave it out"),
    _image_rule("compile.blocks", False, ": torch.compile cannot trace how layers exchange rows", "set it to false"),
    _image_rule(
        "data.buffers", "synchronise", ": no rank has a whole image for its statistics", 'set it to "synchronise"'
    ),
)
STATISTICS_BEHIND_THE_ROWS = Refusal(
    combination="[axes] ring > 1 with images and a BatchNorm behind the layers that keep rows apart",
    why='BatchNorm "{name}" comes where images are no longer split by rows, so that [axes] ring = {num_ranks} would '
    "count every sample {num_ranks} times",
    remedy="move it before what makes maps whole (flatten, interpolate, functions weft does not know), use another "
    "norm, or ring = 1",
)
CHANNELS_DROPPED_BY_ROWS = Refusal(
    combination="[axes] ring > 1 with images and dropout of whole channels (Dropout2d)",
    why="{function} drops whole channels, and ranks that split an image by rows over [axes] ring would each drop "
    "others",
    remedy="use Dropout, or ring = 1",
)
ROWS_OVERWRITTEN = Refusal(
    combination="[axes] ring > 1 with images that the model overwrites in place",
    why="the model overwrites an image that is split by rows ({function}), which [axes] ring cannot follow",
    remedy="use a form of {instead} that makes a new tensor",
)

# --- BatchNorm, recomputation, ZeRO-3 ---------------------------------------------------------------------------------

STATISTICS_OF_ITS_OWN = Refusal(
    combination='[data] buffers = "synchronise" with a BatchNorm that has a forward of its own',
    why='"{name}" is a {kind}, a BatchNorm with a forward of its own, whose statistics weft cannot take over all ranks',
    remedy='use one of torch\'s own, or set [data] buffers = "broadcast" or "local"',
)
COMPILED_STATISTICS = Refusal(
    combination='[compile] blocks = true and [data] buffers = "synchronise" with a BatchNorm inside of a block',
    why='[compile] blocks = true cannot compile "{name}", a BatchNorm that exchanges its statistics with other ranks',
    remedy='set [compile] blocks = false, or [data] buffers = "broadcast" or "local"',
)
BUFFERS_RECOMPUTED = Refusal(
    combination="[recompute] policy with a block that changes a buffer other than BatchNorm's",
    why='{buffer} in block "{block}" changes when the block runs, so that computing the block again would give another '
    "answer",
    remedy='set [recompute] policy = "none", or keep it out of the blocks',
)
HOST_DRAWS_RECOMPUTED = Refusal(
    combination="[recompute] policy with a block that draws from numpy's or Python's random numbers",
    why='block "{name}" draws from the global random numbers of numpy or Python, so that computing it again would draw '
    "others",
    remedy='draw with torch, or set [recompute] policy = "none"',
)
PRODUCTS_OVERWRITTEN = Refusal(
    combination='[recompute] policy = "selective", not compiled, with a block that overwrites a product in place',
    why='block "{name}" overwrites the result of a matrix product or convolution in place, which [recompute] policy = '
    '"selective" keeps',
    remedy='use an operator that is not in place, or policy = "full"',
)
HIDDEN_OUTPUTS = Refusal(
    combination='[data] shard = "parameters" or [axes] pipeline > 1 with a block that returns an object of some class',
    why="{block} returns a {kind}, in which weft cannot see tensors",
    remedy="with {asked} let it return them in {instead}",
)

MODEL_REFUSALS: tuple[Refusal, ...] = tuple(
    value for value in (*vars().values(), *vars(in_process_refusals).values()) if isinstance(value, Refusal)
)
"""All of the above, in this order, and those of replicas in one process."""
