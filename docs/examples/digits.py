"""Images to look at without a download: the handwritten digits that scikit-learn carries, as pictures and as vectors.

    python docs/examples/digits.py digits

writes digits/images/*.png, and digits/database.parquet and digits/queries.parquet (id, label, vector), which
`lattqe import` reads as they are. A picture's 8 × 8 pixels, less their mean over all pictures, are its descriptor.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

EVERY = 30  # one picture of so many asks, the others are the database
SIDE = 64  # pixels of a picture


def main(folder: str) -> None:
    """Write pictures and tables below a folder."""
    digits = load_digits()
    images = Path(folder) / "images"
    images.mkdir(parents=True, exist_ok=True)
    names = [f"{label}-{number:04d}" for number, label in enumerate(digits.target)]
    for name, pixels in zip(names, digits.images):
        picture = Image.fromarray((255 - 255 / 16 * pixels).astype(np.uint8))
        picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(images / f"{name}.png")
    vectors = (digits.data - digits.data.mean(axis=0)).astype(np.float32)
    asks = np.arange(len(names)) % EVERY == 0
    for kind, rows in (("queries", np.flatnonzero(asks)), ("database", np.flatnonzero(~asks))):
        table = {"id": [names[row] for row in rows], "label": digits.target[rows].astype(np.int32)}
        flat = pa.array(vectors[rows].ravel())
        table["vector"] = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        pq.write_table(pa.table(table), Path(folder) / f"{kind}.parquet")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "digits")
