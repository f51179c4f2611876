"""Every error the library raises on purpose. The first module of the flow: it imports nothing.

    DsparkCacheError
    |-- CacheFormatError      a file of a cache is not what it says it is      (also ValueError)
    |-- CacheNotFoundError    a file that a cache must have is not there       (also FileNotFoundError)
    |-- SettingsError         params.yaml or an argument asks for the impossible (also ValueError)
    |-- InputError            conversations, tokenizer, template or target cannot be used (also ValueError)
    |   `-- RowError          one row is no conversation; carries its reason code
    |-- CaptureError          the target ran and gave something unusable       (also RuntimeError)
    |-- LockedError           another live process holds what is to be written (also BlockingIOError)
    `-- VerificationError     a cache was checked and has findings             (also ValueError)

Each is also the built-in exception that a caller would catch who knows nothing of this library.
"""

from __future__ import annotations


class DsparkCacheError(Exception):
    """Base of all errors raised on purpose."""


class CacheFormatError(DsparkCacheError, ValueError):
    """A manifest, shard, block or ledger does not hold what its format or its manifest says."""


class CacheNotFoundError(DsparkCacheError, FileNotFoundError):
    """A file or folder that a cache must have does not exist."""


class SettingsError(DsparkCacheError, ValueError):
    """Settings are unknown, of the wrong type, out of range, or contradict each other."""


class InputError(DsparkCacheError, ValueError):
    """An input (conversations, tokenizer, chat template, target) cannot be used as it is."""


class RowError(InputError):
    """One row is no conversation that can be supervised.

    Attributes:
        reason: Short stable code, the key under which skipped rows are counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        """Keep the code apart from the message, which says what was expected and found."""
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        """Pickle with both arguments, so that the error crosses from a worker process."""
        return type(self), (self.reason, str(self))


class CaptureError(DsparkCacheError, RuntimeError):
    """The target's forward gave something that must not be cached."""


class LockedError(DsparkCacheError, BlockingIOError):
    """Another process holds the lock on what this one would write."""


class Terminated(BaseException):
    """SIGTERM arrived; no error, as KeyboardInterrupt is none."""


class VerificationError(DsparkCacheError, ValueError):
    """A cache was verified and has findings."""
