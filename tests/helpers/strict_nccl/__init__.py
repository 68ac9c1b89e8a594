"""A strict stand-in for NCCL: a c10d backend for CPU tensors that keeps NCCL's rules and names every breach of them.

gloo forgives what NCCL does not: messages have tags, any order of calls works, results are simply there. Under this
backend they are not, on any machine:

    mode.py          which of NCCL's modes is emulated
    calls.py         an operation as one rank called it
    referee.py       the rules: streams, matching, first uses, and who waits for whom; no processes, no tensors
    server.py        the referee's process, which the ranks talk to through sockets
    client.py        a rank's connection to it
    memory.py work.py    results that are invisible until `wait`, and memory that nobody may touch meanwhile
    ring.py          sums as a ring of ranks makes them
    host_memory.py   which tensors would lie in the host's memory
    sites.py         where in the program something was called
    group.py         the process group
    world.py         `strict_world`, in which all this holds

This file imports nothing: the referee's process must start at once, without torch.
"""
