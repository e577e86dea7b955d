"""The whitening that some published networks carry beside their weights, for features extracted with them."""

import numpy as np
import xxhash

from lattqe.errors import LattqeError
from lattqe.extraction.checkpoint import read_checkpoint
from lattqe.extraction.files import read_file
from lattqe.whitening import Whitening


def published_whitening(uri: str, training_set: str | None, scales: str) -> tuple[Whitening, str]:
    """Read `meta['Lw'][training_set][scales]` ('ss' or 'ms') of a network file; → the whitening, the file's digest."""
    data = read_file(uri)
    found = read_checkpoint(data, uri).post_whitening
    if not isinstance(found, dict) or not found:
        raise LattqeError(f"{uri} carries no whitening (no 'Lw' in its meta): learn one with `lattqe whiten learn`")
    if training_set is None and len(found) == 1:
        training_set = next(iter(found))
    try:
        entry = found[training_set][scales]
        mean, projection = np.asarray(entry["m"], dtype=np.float64), np.asarray(entry["P"], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise LattqeError(f"{uri} carries no readable whitening {training_set!r} for {scales!r}: choose with "
                          f"--training-set (it has {', '.join(map(repr, found))}) and --single-scale") from None
    config = {"method": "published", "training_set": training_set, "scales": scales}
    return Whitening(mean.reshape(-1), projection, config), xxhash.xxh3_128_hexdigest(data)
