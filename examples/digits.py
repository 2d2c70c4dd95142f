"""scikit-learn's digits, split the same way on every rank: 1440 images of 8 × 8 to train on, 357 to test with."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 0
PIXELS = 64
CLASSES = 10


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images (1440 × 64, float32 from 0 to 1) and labels (1440), test images (357 × 64) and labels (357)."""
    images, labels = load_digits(return_X_y=True)
    # 357 of the 1797 images leave 1440 for training: no remainder on 2, 3, 4, 5, 6 or 8 ranks.
    train_x, test_x, train_y, test_y = train_test_split(
        (images / 16).astype("float32"),
        labels.astype("int64"),
        test_size=357,
        random_state=SEED,
        stratify=labels,
    )
    return train_x, train_y, test_x, test_y
