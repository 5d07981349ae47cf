"""Errors that Paceline raises on purpose; each message says what to do."""


class PacelineError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(PacelineError, ValueError):
    """A setting or argument is not allowed."""


class RequestError(PacelineError, ValueError):
    """A request cannot be honoured; becomes HTTP 400 with this message."""


class CapacityError(PacelineError):
    """The engine's queue is full; becomes HTTP 429."""


class DrafterMismatchError(PacelineError, ValueError):
    """Drafter weights do not fit this target (hash, shapes, dtypes or non-finite values)."""


class ManifestError(PacelineError, ValueError):
    """A drafter manifest is missing, unreadable or does not match its weights."""


class IllegalTransitionError(PacelineError):
    """A life-cycle transition that the table does not allow."""


class FencedError(PacelineError):
    """Another controller took over (newer epoch); this one must stop writing."""


class StateError(PacelineError):
    """Stored state cannot be used: of a newer format, unreadable, or of another service. It is left as it is."""


class StorageHangsError(PacelineError):
    """A folder or object store does not answer; what needs it is done when it does."""


class EngineAwayError(PacelineError):
    """An engine that others run does not answer, or not to this key: no fault of what it was asked to load."""


class RankError(PacelineError):
    """The ranks of a split target do not do the same work, or one is missing: the process must be started again."""


class EngineStoppedError(PacelineError):
    """The engine is shutting down or has failed; the request was not completed."""


class TraceError(PacelineError, ValueError):
    """A trace or trace shard is inconsistent, damaged or gone."""


class SupportError(PacelineError, ValueError):
    """A log of decisions does not bear on the policy that is to be evaluated."""
