"""What the checks of commands raise."""


class Finding(AssertionError):
    """What is wrong with a command."""
