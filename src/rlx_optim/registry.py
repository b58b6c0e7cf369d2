"""The fourteen, as data: name -> (file, class, one line)."""

OPTIMIZERS: dict[str, tuple[str, str, str]] = {
    "sgd": ("sgd", "SGD", "plain, heavy-ball or Nesterov momentum"),
    "adam": ("adam", "Adam", "first over root of second moment, coupled decay"),
    "adamw": ("adamw", "AdamW", "Adam with decoupled weight decay"),
    "nadamw": ("nadamw", "NAdamW", "AdamW with Nesterov momentum, three conventions"),
    "radam": ("radam", "RAdam", "Adam that rectifies its early steps, no warm-up"),
    "qhadamw": ("qhadamw", "QHAdamW", "AdamW with quasi-hyperbolic moments"),
    "lamb": ("lamb", "Lamb", "AdamW's direction scaled by each tensor's norm, for large batches"),
    "adafactor": ("adafactor", "Adafactor", "factored second moment, almost no state"),
    "lion": ("lion", "Lion", "sign of an interpolated momentum, half of Adam's state"),
    "soap": ("soap", "SOAP", "Adam in the eigenbasis of Shampoo's preconditioner"),
    "kronpsgd": ("kronpsgd", "KronPSGD", "momentum whitened by learned Kronecker factors"),
    "muon": ("muon", "Muon", "orthogonalised momentum for hidden matrices"),
    "sophia": ("sophia", "Sophia", "momentum over a diagonal Hessian estimate, clipped"),
    "mars": ("mars", "MARS", "AdamW or Lion on a variance-reduced gradient"),
}
ALIASES = {"kron": "kronpsgd"}
