"""Parameters that are spread over ranks by torch.distributed: DTensors (FSDP2, HSDP, tensor parallel) and DDP models.

`layout` reads where a parameter lies, `homes` says where its state is kept, `exchange` sends shards to owners and back,
`reducing` adds up over ranks what a rule measures of whole tensors, `consensus` lets ranks agree before anything is touched;
`placements.sharded` and `placements.owner` step them. Nothing here is imported before the first such parameter.
"""
