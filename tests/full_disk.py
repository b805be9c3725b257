"""A disk that is full, for this process: no file of it can become longer than a limit."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Limit every file of this process, as a full disk does."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
