"""Parameters that are spread over ranks by torch.distributed: DTensors (FSDP2, HSDP, tensor parallel) and DDP models.

`layout` reads where a parameter lies, `homes` says where its state is kept, `lanes` steps it: elementwise rules on the shards
alone, rules that measure whole tensors with batched all-reduces (`reducing`), matrix rules on one owner per matrix (`exchange`).
`council` lets ranks agree before anything is touched. Nothing here is imported before the first such parameter.
"""
