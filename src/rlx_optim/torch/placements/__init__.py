"""Where parameters, gradients and state are, and how they reach an engine and come back.

`local` has them in this process's memory, `host` the state in the host's, `sharded` and `owner` are for parameters that are
spread over ranks: each rank steps its shards, or one rank each matrix. Nothing of the last two is imported before the first such
parameter.
"""
