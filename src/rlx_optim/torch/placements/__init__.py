"""Where parameters, gradients and state are, and how they reach an engine and come back.

`build` makes placements from an optimizer's groups and state. `local` has tensors in this process's memory, `captured` has the
counts on the device too, for CUDA graphs, and `host` has state in the host's memory.

For parameters that torch.distributed spreads over ranks (DTensors: FSDP2, HSDP, tensor parallel; DDP models): `comm` reads where
a parameter lies and who shares it, `homes` says where its state is kept. `sharded` steps shards and adds up over ranks what a
rule measures of whole tensors; `owner` has one rank step each matrix, and `exchange` sends shards to owners and back.
`consensus` lets ranks agree before anything is touched. None of these is imported before the first such parameter.
"""
