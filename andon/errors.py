"""Errors that a person reads: what happened, the likely cause, what to try."""


class UserError(ValueError):
    """Something the user can put right; the command line prints its three lines and exits with 1."""

    def __init__(self, what: str, cause: str, remedy: str) -> None:
        super().__init__(what, cause, remedy)
        self.what, self.cause, self.remedy = what, cause, remedy

    def __str__(self) -> str:
        return f"{self.what}\n{self.cause}\n{self.remedy}"
