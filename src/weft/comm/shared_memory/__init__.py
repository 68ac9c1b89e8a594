"""The transport between CPU ranks of one host: segments, counters, mailboxes, compiled sums."""
