"""The command line on a machine without a network: no mirror of MNIST answers. Started by tests, also by torchrun."""

if __name__ == "__main__":
    from torchvision.datasets import MNIST

    from fsdp_helpers.__main__ import run

    MNIST.mirrors = ["http://127.0.0.1:1/"]  # a port that nobody listens on
    run()
