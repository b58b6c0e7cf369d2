"""One file an optimizer: the idea, the formulas, the rule. Nothing here knows where it will run."""
