"""LAttQE: weights predicted by the attention network from the whole list (section 3.3 of the paper)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from lattqe.device import pick_device
from lattqe.errors import LattqeError
from lattqe.expansion.base import Expanded, Lists, Method, aggregate, check_finite, parameter
from lattqe.model.fast import PRECISIONS, FastLAttQE, check_precision, shared_width
from lattqe.model.gated import WholeList
from lattqe.model.network import LAttQE
from lattqe.store import open_place, read_manifest
from lattqe.store.models import model_address

FEW_ROWS = 200  # of a database, in which features flow less; chosen on validation


def load_network(model: str | LAttQE | None) -> LAttQE:
    """The network that a model's address, or the network itself, stands for; None: the one that ships."""
    return model if isinstance(model, LAttQE) else LAttQE.load(model_address(model))


def model_inputs(params: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """How an artifact made with these parameters names the stored model among its inputs; empty where there is none."""
    model = params.get("model")
    if not isinstance(model, str):
        return {}
    place = open_place(model_address(model))
    return {"model": {"uri": place.uri, "digest": read_manifest(place, "model").digest, "kind": "model"}}


@dataclass
class AttentionExpansion(Method):
    """w_i = cos(q̃, d̃_i) in the transformed space; for database rows (dba) softmax(cos / T).

    When many database rows are expanded, the first products of each row can be computed once and kept (on disk,
    memory-mapped): `table = shared_rows(xb)`, then `expand_shared` instead of `expand`.
    """

    name: ClassVar[str] = "lattqe"
    default_k: ClassVar[int] = 64
    default_k_dba: ClassVar[int] = 48
    label: ClassVar[str] = "LAttQE"
    dba_label: ClassVar[str] = "LAttDBA"
    learned: ClassVar[bool] = True
    row_params: ClassVar[dict[str, Any]] = {"dba": True}
    # where a trained network is stored, or the network itself
    model: str | LAttQE | None = parameter(
        None, "The trained model, a folder or s3:// address; default: the shipped one", address=True
    )
    dba: bool = False  # the tempered softmax, for rows of the database
    # faster than float32, cosine to its result above .999
    precision: str = parameter(
        "float32", f"Arithmetic of the network: {', '.join(PRECISIONS)}; int8 on CPUs, half on GPUs"
    )
    network: LAttQE = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.network = load_network(self.model)
        if self.precision not in PRECISIONS:
            raise LattqeError(f"unknown precision {self.precision!r}: use one of {', '.join(PRECISIONS)}")
        if self.precision != "float32" and self.network.config.relational:
            raise LattqeError(
                f"precision {self.precision}: this network compares similarities, which need float32, and has few "
                "products to speed up: leave --precision out"
            )

    @cached_property
    def fast(self) -> FastLAttQE:
        """The network on the device; made where it is used, as a driver plans for workers with other devices."""
        return FastLAttQE(self.network, self.precision, pick_device(self.device))

    def check_device(self, device: torch.device) -> None:
        """See Method."""
        check_precision(self.precision, device)

    @property
    def params(self) -> dict[str, Any]:
        """What decides the result, ready for JSON; a network that was never stored has no name."""
        return {**super().params, "model": None if isinstance(self.model, LAttQE) else model_address(self.model)}

    def suggested_k(self, dba: bool, augmented: bool = False) -> int:
        """The number that training chose for this network, else the paper's, as far as the network has ranks."""
        k = self._chosen(dba, augmented) or super().suggested_k(dba)
        return min(k, self.network.config.max_k)

    def origin_of_k(self, augmented: bool = False) -> str:
        """Where `suggested_k` for queries comes from, in words."""
        if self._chosen(False, augmented) is None:
            return super().origin_of_k()
        with_dba = augmented and self._chosen(False, False) != self._chosen(False, True)
        return "chosen by training for augmented databases" if with_dba else "chosen by training"

    def _chosen(self, dba: bool, augmented: bool) -> int | None:
        """What the model's metrics name, None where they do not."""
        metrics = self.network.metrics
        for name in ("ndba",) if dba else ("nqe_with_dba", "nqe") if augmented else ("nqe",):
            if isinstance(metrics.get(name), int) and metrics[name] > 0:
                return int(metrics[name])
        return None

    @property
    def default_hops(self) -> int:
        """The number that training chose for this network."""
        chosen = self.network.metrics.get("hops", 1)
        return chosen if isinstance(chosen, int) and chosen > 0 else 1

    @property
    def adapts(self) -> bool:
        """Whether training was for adapted collections."""
        return self.network.metrics.get("adapt") is True

    def hop_alpha(self, rows: int) -> float:
        """What the network learned, where it was trained through hops; less in a very small database.

        A list that is the whole database has no background, and does not show how few of its rows are relevant.
        """
        return self.network.alpha.item() * min(1.0, max(rows, 1) / FEW_ROWS) ** 2

    @property
    def largest_k(self) -> int | None:
        """As many as the network has ranks."""
        return self.network.config.max_k

    def depth(self, k: int) -> int:
        """A background needs a longer list than the k neighbors that are weighed."""
        return self.network.depth(k)

    def check_width(self, dim: int, what: str = "vectors") -> None:
        """Refuse vectors that the network was not made for, naming both."""
        try:
            self.network.check_width(dim)
        except LattqeError as error:
            model = f" {self.model}" if isinstance(self.model, str) else ""
            raise LattqeError(f"the model{model} does not fit the {what}: {error}") from None

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), from -1 to 1 but for relational networks; with dba positive and adding up to 1."""
        t = 1 + lists.k
        return self.fast.weights(lists.items[:, :t], lists.valid[:, :t], self.dba, k=lists.weighed)

    def terms(self, lists: Lists) -> torch.Tensor:
        """The vectors; of a direct network what its encoders make of them."""
        network, t = self.fast.network, 1 + lists.k
        if not network.config.direct:
            return lists.items
        return network(lists.items[:, :t].to(self.fast.dtype), lists.valid[:, :t]).transformed.float()

    @property
    def means_suffice(self) -> bool:
        """Whether database rows need of neighbors beyond the k weighed ones only their mean and their scores."""
        return self.dba and self.network.config.relational

    def expand_rows(
        self, x: np.ndarray, table: torch.Tensor, lists: np.ndarray, scores: np.ndarray, k: int
    ) -> Expanded:
        """`expand` for database rows x (n, D) where `means_suffice`: the same within 1e-4, without the lists' vectors.

        table (m, D) float32 has the rows that lists (n, depth) name, by their place in it, -1 for missing; scores
        (n, depth) are those of the graph.
        """
        device = self.fast.device
        places, known = torch.from_numpy(np.maximum(lists, 0)).to(device), torch.from_numpy(lists >= 0).to(device)
        table, own = table.to(device), torch.from_numpy(x.astype(np.float32)).to(device)
        with torch.inference_mode():
            # Equal among that many of the first valid ones, as `background_share` has it.
            share = known[:, : self.fast.config.background or k].float()
            share = share / share.sum(1, keepdim=True).clamp(min=1)
            background = functional.embedding_bag(
                places[:, : share.shape[1]].contiguous(), table, mode="sum", per_sample_weights=share
            )
            near = table[places[:, :k]].masked_fill_(~known[:, :k, None], 0)
            items, valid = torch.cat([own[:, None], near], dim=1), functional.pad(known[:, :k], (1, 0), value=True)
            given = torch.from_numpy(np.where(lists >= 0, scores, 0).astype(np.float32)).to(device)
            w = self.fast.weights_of_rows(items, valid, WholeList(background, given, known))
            w = torch.where(valid, w, 0)
            vectors = aggregate(w, items).cpu().numpy()
        check_finite(self.name, vectors)
        weights = np.zeros((len(x), 1 + lists.shape[1]), dtype=np.float32)
        weights[:, : 1 + k] = w.cpu().numpy()
        return Expanded(vectors, weights)

    @property
    def shared_width(self) -> int:
        """Columns of `shared_rows`; 0 where the network has nothing to share and `expand` is the way."""
        return shared_width(self.network.config)

    @property
    def shared_products(self) -> int:
        """W d of the first encoder (3 W × W), and the token itself (D × W) where the vectors are projected."""
        config = self.network.config
        width = config.token_width
        projected = 0 if config.width is None else config.dim * width
        return 3 * width * width + projected if self.shared_width else 0

    def shared_rows(self, x: np.ndarray) -> np.ndarray:
        """What all lists share of database rows x (n, D): (n, shared_width) float32, 4 × shared_width bytes a row."""
        return self.fast.shared_rows(torch.from_numpy(x.astype(np.float32))).cpu().numpy()

    def expand_shared(
        self, x: np.ndarray, neighbors: np.ndarray, scores: np.ndarray, table: np.ndarray, rows: np.ndarray
    ) -> Expanded:
        """`expand` with the first products looked up: the same result within 1e-4, about a sixth less work.

        x (n, D), neighbors (n, k, D), scores (n, k); table (nb, shared_width), what `shared_rows` gave for the
        whole database (float32, or float16 for half the bytes; may be memory-mapped: rows are read batch by batch);
        rows (n, 1 + k): where the item itself and its neighbors stand in the table, -1 for missing neighbors.
        """
        n, k = scores.shape
        if rows.shape != (n, 1 + k) or neighbors.shape[:2] != (n, k) or len(x) != n:
            raise LattqeError(
                f"rows {rows.shape} do not fit scores {scores.shape}: expected (n, 1 + k), the item first"
            )
        if table.ndim != 2 or table.shape[1] != self.shared_width:
            raise LattqeError(f"table {table.shape} does not fit: this network shares {self.shared_width} columns")
        if n and (rows.max() >= len(table) or rows[:, 0].min() < 0):
            raise LattqeError(f"row {int(rows.max())} is not in the table of {len(table)} rows")

        def weigh(block: slice, lists: Lists) -> torch.Tensor:
            wanted = np.maximum(rows[block], 0)
            return self.fast.weights(
                lists.items,
                lists.valid,
                self.dba,
                lambda batch: torch.from_numpy(np.take(table, wanted[batch], axis=0)),
            )

        return self._expand([x[:, None], neighbors], [rows >= 0], scores, weigh)
