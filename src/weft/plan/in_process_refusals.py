"""Every refused combination of plan values with replicas in one process, and of servers with ranks that do not run."""

from __future__ import annotations

from weft.plan.refusals import Refusal

SERVERS_IN_PROCESS = Refusal(
    combination='replicas in process with [data] sync = "server"',
    why="with {data.sync} workers exchange through servers, which are processes of their own",
    remedy="start real workers, which weft train does on this machine, or set another sync",
)
SERVERS_ON_META = Refusal(
    combination='[data] sync = "server" on the meta device or in a fake world',
    why="with {data.sync} every worker is a world of its own and its servers are running processes, and on the meta "
    "device nothing runs",
    remedy='look at one worker: [axes] data = 1 and [data] sync = "all-reduce" hold the same, and the optimizer\'s '
    "state, which the servers keep, besides",
)
REPLICAS_THAT_NEVER_DIFFER = Refusal(
    combination='replicas in process with [data] sync = "all-reduce" and without a codec',
    why="with {data.sync} and {codec.name} nothing differs between replicas, and what they exchange is exact: one rank "
    "with [step] microbatches = {num_microbatches} gives the same answer",
    remedy='run that, or set [data] sync = "local" or [codec] name to study what these change',
)
BATCH_STATISTICS_OF_WORKERS = Refusal(
    combination='replicas in process with [data] sync = "all-reduce" and a model with BatchNorm, unless [data] buffers '
    '= "broadcast"',
    why="ranks in process compute one after the other, and with {data.buffers} a BatchNorm needs all of them at once, "
    "or statistics for each",
    remedy='set [data] buffers = "broadcast", use a norm without batch statistics, or start real ranks',
)
BALANCED_WORKERS = Refusal(
    combination='replicas in process with [data] sync = "all-reduce" and [data] balance',
    why="{data.balance} gives ranks parts of the batch by their speed, and ranks in process have none",
    remedy="leave it out",
)
GATHERED_IN_PROCESS = Refusal(
    combination='replicas in process with [data] sync = "all-reduce" and a loss that calls weft.gather_batch',
    why="the loss gathers the samples of {num_parts} data ranks, and in process these compute one after the other",
    remedy="start real ranks",
)
NOTHING_TO_MEASURE = Refusal(
    combination='replicas in process with [data] delay = "auto"',
    why="{data.delay} measures how long exchanges take, and in process they take no time",
    remedy="set a number of steps",
)
REPLICAS_OF_SEVERAL_RANKS = Refusal(
    combination="replicas in process whose replicas are several ranks ([axes] pipeline, tensor, ring, ulysses, or data "
    "with [data] shard)",
    why="a replica in process is one rank, and with {axes} a replica is {num_ranks} ranks",
    remedy="leave these out, which changes nothing about how replicas exchange, or start real ranks",
)
UNCOUNTED_REPLICAS = Refusal(
    combination='replicas in process with [axes] data = "all"',
    why='[axes] data = "all" stands for the number of ranks that run, and replicas in process are one process',
    remedy="write the number of replicas",
)
REPLICAS_IN_SEVERAL_PROCESSES = Refusal(
    combination="replicas in process on several ranks",
    why="replicas in process need one process, and {num_processes} were started",
    remedy="start one, or let each rank be a replica: leave out replicas in process",
)
