"""Where the program `rlx-optim` starts: beside the package, so that Ctrl-C is minded while the package is imported."""


def main() -> int:
    try:
        from rlx_optim.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
