"""The laboratory: what measures rlx-optim, and is in the repository alone.

`bench` (with `measure`, `cuda`, `offload`, `results`), `parity`, `landscape` and `races.command` are commands of `rlx-optim`,
which finds this package in a checkout; `language` is `rlx-optim check --language`, every construct of the language of rules
(`constructs`) on every engine. `peers` has the same rules elsewhere. `docsite`, `site_hook` and `readme` make the tables
of the documentation from the results in `benchmarks/`, which `conformance`, `peak`, `precision`, `situations` and `thin_race`
write. `stubs` writes the .pyi files, `gpu_tests` runs the tests that need a GPU. Scripts are started as `python -m lab.NAME` in
the root of the repository.
"""
