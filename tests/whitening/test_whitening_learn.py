"""Whitening against numpy, scikit-learn, loops over all pairs, and the real photographs' own whitening."""

import numpy as np
import pytest

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, FeatureWriter
from lattqe.whitening import Moments, Whitening, learn, moments, pair_moments, principal, supervised


@pytest.fixture(scope="module")
def rows():
    """Correlated rows far from the origin, (300, 12)."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(300, 12)) @ rng.normal(size=(12, 12)) + 5


@pytest.fixture(scope="module")
def labels():
    """Classes of unequal sizes, some of one row, some rows unlabelled."""
    rng = np.random.default_rng(1)
    labels = rng.choice([0, 1, 1, 1, 2, 2, 7], size=300)
    labels[:3] = [100, 101, -1]
    labels[50:60] = -1
    return labels


def blocks(rows, size=37):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@pytest.fixture
def stored(tmp_path, rows, labels):
    uri = str(tmp_path / "features")
    with FeatureWriter(uri, 12, "float32", labels=True) as writer:
        writer.append(rows, [str(number) for number in range(300)], labels.astype(np.int32))
        writer.close()
    return FeatureSet.open(uri)


@pytest.mark.parametrize("size", [1, 7, 300, 1000])
def test_moments_by_blocks(rows, size):
    found = moments(blocks(rows, size))
    assert found.count == 300
    np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(rows.T, bias=True), rtol=1e-10)


def test_moments_survive_a_large_offset(rows):
    """The textbook formula E[x²] - E[x]² would have no correct digit here."""
    np.testing.assert_allclose(moments(blocks(rows + 1e7)).covariance, np.cov(rows.T, bias=True), rtol=1e-5)


def test_pca_against_scikit_learn(rows):
    from sklearn.decomposition import PCA

    whitening = principal(moments(blocks(rows)), power=0.0, dim=5)
    reference = PCA(n_components=5).fit(rows)
    expected = reference.transform(rows)
    got = (rows - whitening.mean) @ whitening.projection.T
    np.testing.assert_allclose(np.abs(got), np.abs(expected), atol=1e-8)
    assert whitening.config["variance_kept"] == pytest.approx(reference.explained_variance_ratio_.sum())


def test_full_whitening_against_scikit_learn(rows):
    from sklearn.decomposition import PCA

    whitening = principal(moments(blocks(rows)), power=-0.5, dim=5)
    expected = PCA(n_components=5, whiten=True).fit_transform(rows) * np.sqrt(300 / 299)
    np.testing.assert_allclose(np.abs((rows - whitening.mean) @ whitening.projection.T), np.abs(expected), atol=1e-8)


def test_half_whitening_leaves_the_square_root_of_the_variance(rows):
    whitening = principal(moments(blocks(rows)), power=-0.25)
    projected = (rows - whitening.mean) @ whitening.projection.T
    values = np.sort(np.linalg.eigvalsh(np.cov(rows.T, bias=True)))[::-1]
    np.testing.assert_allclose(np.cov(projected.T, bias=True), np.diag(np.sqrt(values)), atol=1e-8)


def slow_pair_moments(rows, labels):
    """Over all ordered pairs of one class: every row counts once, its partners share it."""
    total, mean, count = np.zeros((12, 12)), np.zeros(12), 0
    for i, x in enumerate(rows):
        partners = [j for j in range(len(rows)) if j != i and labels[j] == labels[i] and labels[i] >= 0]
        if partners:
            count += 1
            mean += x
            total += sum(np.outer(x - rows[j], x - rows[j]) for j in partners) / len(partners)
    return mean / count, total / count


@pytest.mark.parametrize("size", [1, 37, 300])
def test_pairs_against_the_loop(rows, labels, size):
    mean, differences = slow_pair_moments(rows, labels)
    found = pair_moments(blocks(rows, size), labels)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(found.differences, differences, rtol=1e-9, atol=1e-9)


def test_learned_whitening_against_the_published_recipe(rows, labels):
    """inv(cholesky(S)), then the eigenvectors of the projected scatter: with numpy, as in the published code."""
    mean, differences = slow_pair_moments(rows, labels)
    inverse = np.linalg.inv(np.linalg.cholesky(differences))
    centred = inverse @ (rows - mean).T
    values, vectors = np.linalg.eig(centred @ centred.T)
    expected = vectors[:, values.argsort()[::-1]].T @ inverse
    whitening = supervised(moments(blocks(rows)), pair_moments(blocks(rows), labels), dim=7)
    np.testing.assert_allclose(whitening.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(np.abs(whitening.projection), np.abs(expected[:7]), atol=1e-7)


def test_learned_whitening_whitens_differences(rows, labels):
    whitening = supervised(moments(blocks(rows)), pair_moments(blocks(rows), labels))
    projected = pair_moments(blocks(rows @ whitening.projection.T), labels)
    np.testing.assert_allclose(projected.differences, np.eye(12), atol=1e-8)


def test_learned_whitening_helps_where_classes_hide_in_noise():
    """Classes differ along quiet directions under loud noise common to all: that noise is what it removes."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 10)
    x = np.concatenate(
        [rng.normal(size=(40, 4))[labels] + 0.2 * rng.normal(size=(400, 4)), 6 * rng.normal(size=(400, 4))], axis=1
    )

    def precision(x):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        scores = x @ x.T - 2 * np.eye(len(x))
        nearest = np.argsort(-scores, axis=1)[:, :5]
        return (labels[nearest] == labels[:, None]).mean()

    whitening = supervised(moments([x]), pair_moments([x], labels), dim=4)
    assert precision(whitening.apply(x)) > 0.8 > 0.4 > precision(x)


@pytest.mark.parametrize("method", ["pca", "half", "full", "learned"])
def test_learn_from_a_feature_set(stored, tmp_path, method):
    whitening = learn(stored, method, dim=6)
    assert (whitening.input_dim, whitening.dim) == (12, 6)
    manifest = whitening.save(str(tmp_path / "whitening"), {"features": stored.as_input()})
    loaded, same = Whitening.load(str(tmp_path / "whitening"))
    assert same == manifest
    assert manifest.inputs["features"]["digest"] == stored.digest
    assert loaded.config["method"] == method
    x = stored.read()
    np.testing.assert_allclose(loaded.apply(x), whitening.apply(x), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(loaded.apply(x), axis=1), 1, atol=1e-6)
    assert "model.safetensors" in [part.name for part in manifest.parts]


def test_twice_the_same(stored, tmp_path):
    first = learn(stored, "half").save(str(tmp_path / "whitening"))
    assert learn(stored, "half").save(str(tmp_path / "whitening")) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "zca"}, "method 'zca' is not known"),
        ({"dim": 13}, "dim 13 is not between 1 and the features' 12"),
        ({"dim": 0}, "dim 0"),
    ],
)
def test_wrong_settings_are_named(stored, change, message):
    with pytest.raises(LattqeError, match=message):
        learn(stored, **change)


def test_directions_without_variance(tmp_path):
    """Three rows span two directions: whitening keeps those, and refuses to invent more."""
    with FeatureWriter(str(tmp_path / "few"), 12, "float32") as writer:
        writer.append(np.eye(12)[:3], ["a", "b", "c"])
        writer.close()
    few = FeatureSet.open(str(tmp_path / "few"))
    assert learn(few, "full").dim == 2
    assert learn(few, "pca").dim == 12
    with pytest.raises(LattqeError, match="vary in only 2 directions: use at most --dim 2"):
        learn(few, "half", dim=3)
    with pytest.raises(LattqeError, match="no labels"):
        learn(few, "learned")


def test_pairs_are_needed(rows):
    with pytest.raises(LattqeError, match="no two of 300 rows have the same label"):
        pair_moments(blocks(rows), np.arange(300))


def test_nearly_singular_differences_are_regularised(labels):
    """Classes that do not vary in some directions: a little is added to the diagonal, and said."""
    rng = np.random.default_rng(0)
    flat = np.concatenate([rng.normal(size=(300, 10)), np.repeat(labels[:, None], 2, axis=1)], axis=1).astype(float)
    whitening = supervised(moments([flat]), pair_moments([flat], labels))
    assert whitening.config["added_to_diagonal"] > 0
    assert np.isfinite(whitening.projection).all()


def test_equal_rows_cannot_be_whitened():
    with pytest.raises(LattqeError, match="all rows are equal"):
        principal(Moments(3, np.ones(4), np.zeros((4, 4))), power=0.0)
    with pytest.raises(LattqeError, match="does not fit"):
        Whitening(np.zeros(3), np.zeros((2, 4)))
    with pytest.raises(LattqeError, match="row 1 of 2 has no direction"):
        Whitening(np.ones(2), np.eye(2)).apply(np.array([[2.0, 1.0], [1.0, 1.0]]))


def test_convention_of_the_real_photographs(photos_folder):
    """Their half whitening has rows λ^-1/4 v: orthogonal, growing, leaving variances as the square root of λ."""
    stored = np.load(photos_folder / "whitening.npz")
    projection = stored["projection"].T.astype(np.float64)
    lengths = np.linalg.norm(projection, axis=1)
    np.testing.assert_allclose(projection @ projection.T / np.outer(lengths, lengths), np.eye(len(lengths)), atol=1e-5)
    values = lengths**-4.0
    assert (np.diff(values) <= 0).all()
    sets = ("cub200", "cars196", "grocery81", "caltech101")
    vectors, splits = (
        np.concatenate([np.load(photos_folder / f"{name}_{what}.npy") for name in sets])
        for what in ("vectors", "split")
    )
    variances = vectors[splits == 0].astype(np.float32).var(axis=0)
    slope, _ = np.polyfit(np.log(values), np.log(variances), 1)
    assert slope == pytest.approx(0.5, abs=0.02)
    # Ours, learned from rows with those eigenvalues, has the same projection up to signs.
    axes = projection / lengths[:, None]
    covariance = (axes.T * values) @ axes
    ours = principal(Moments(1, stored["mean"], covariance), power=-0.25, dim=64)
    np.testing.assert_allclose(np.abs(np.sum(ours.projection * projection[:64], axis=1)), lengths[:64] ** 2, rtol=1e-4)
