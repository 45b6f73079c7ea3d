"""VirtualLoader: the microbatches of virtual ranks, each found by its step and virtual rank, and
how far the training has come.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

_DATA, _ORDER, _LEAF = range(3)  # what a seed is for


class VirtualLoader:
    """Loads a map-style dataset for Reducer.virtual(). What a microbatch holds, and the random
    numbers that the dataset draws for it, depend on its step and its virtual rank alone, and not on
    the number of ranks or of workers.

    virtual_ranks: how many microbatches make a step; as long as the training lasts.
    batch_size: samples of a microbatch.
    seed: of the order of samples, of what the dataset draws, and of the leaves (dropout).
    shuffle: another order in every epoch; False: as they come.
    options: those of torch.utils.data.DataLoader, as num_workers, collate_fn and pin_memory.

    step: how many steps were made.

    An epoch leaves out the samples at its end that do not make a step. Raises ValueError for a
    dataset that makes none, TypeError for an IterableDataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        virtual_ranks: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                "VirtualLoader finds samples by their numbers: give it a dataset with __len__ and "
                "__getitem__, not an IterableDataset"
            )
        self.virtual_ranks, self.batch_size, self.seed = virtual_ranks, batch_size, seed
        self.step = 0
        self._dataset, self._shuffle, self._options = dataset, shuffle, options
        self._n_samples: int = len(dataset)  # type: ignore[arg-type]
        if min(virtual_ranks, batch_size) < 1 or not len(self):
            raise ValueError(
                f"{self._n_samples} samples make no step of {virtual_ranks} microbatches with "
                f"{batch_size} samples each"
            )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._n_samples // (self.virtual_ranks * self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0."""
        return self.step // len(self)

    def state_dict(self) -> dict[str, Any]:
        """How far the training has come, and what its bits depend on. Holds no random states."""
        return {"step": self.step, **self._described()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where state_dict() was called. Raises ValueError, naming the first difference,
        where the training would not have the same bits: another loader, number of threads, or
        kernels (processor, torch build).
        """
        for name, own in self._described().items():
            if state[name] != own:
                raise ValueError(
                    f"the checkpoint has {name} {state[name]}, and this process {own}: the steps "
                    "would not have the same bits"
                )
        self.step = state["step"]

    def _described(self) -> dict[str, Any]:
        """What the bits of a step depend on, by name."""
        return {
            "virtual_ranks": self.virtual_ranks,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "samples": self._n_samples,
            "shuffle": self._shuffle,
            "threads": torch.get_num_threads(),
            "kernels": fingerprint_of_kernels(),
        }

    def microbatches(self, own: range) -> Iterator[Any]:
        """For reducers: the microbatches of these virtual ranks, to the end of the epoch."""
        keyed: Any = DataLoader(
            _Keyed(self._dataset, self.seed, self.virtual_ranks),
            batch_sampler=self._keys(own),
            generator=torch.Generator("cpu"),  # else it would draw from torch's own
            **self._options,
        )
        return iter(keyed)

    def _keys(self, own: range) -> Iterator[list[Any]]:
        """Of each microbatch its key, and the numbers of its samples."""
        epoch, size = self.epoch, self.batch_size
        order: Sequence[int] = range(self._n_samples)
        if self._shuffle:
            generator = torch.Generator("cpu").manual_seed(mixed(self.seed, _ORDER, epoch))
            order = torch.randperm(
                self._n_samples, generator=generator, dtype=torch.int64, device="cpu"
            ).tolist()
        for step in range(self.step, (epoch + 1) * len(self)):
            for v in own:
                begin = (step % len(self) * self.virtual_ranks + v) * size
                yield [(step, v), *order[begin : begin + size]]

    def seed_leaf(self, step: int, v: int, device: torch.device) -> None:
        """For reducers: seeds all generators for a virtual rank, or for what follows the last one
        (v = virtual_ranks).
        """
        seed_all(mixed(self.seed, _LEAF, step * (self.virtual_ranks + 1) + v), device)


class _Keyed(Dataset[Any]):
    """The dataset, with random numbers by the key of the microbatch."""

    def __init__(self, dataset: Dataset[Any], seed: int, virtual_ranks: int) -> None:
        self._dataset, self._seed, self._virtual_ranks = dataset, seed, virtual_ranks

    def __getitems__(self, key_and_indices: list[Any]) -> list[Any]:
        (step, v), *indices = key_and_indices
        seed_all(mixed(self._seed, _DATA, step * self._virtual_ranks + v), torch.device("cpu"))
        of_many = getattr(self._dataset, "__getitems__", None)
        return of_many(indices) if of_many else [self._dataset[i] for i in indices]


def mixed(seed: int, what: int, number: int) -> int:
    """A seed of 32 bits, as torch's generator of the CPU uses no more. Of one `seed`, two differ
    wherever 3 * number + what does.
    """
    value = (seed * 0x9E3779B1 + 3 * number + what) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value = ((value ^ value >> shift) * factor) & 0xFFFFFFFF
    return value ^ value >> 16


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds torch's generators of the CPU and of the device, Python's, and NumPy's if it is used.
    torch.manual_seed() takes 80 times as long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def fingerprint_of_kernels() -> int:
    """A hash of what some kernels of the CPU make of fixed numbers. Differs where the processor,
    the build of torch, or the number of threads chooses other ones.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    a, image = numbers(96, 160), numbers(2, 8, 20, 20)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        results = [
            a @ numbers(160, 70),
            (a.bfloat16() @ numbers(160, 70).bfloat16()).float(),
            functional.conv2d(image, numbers(16, 8, 3, 3)),
            functional.layer_norm(a, (160,)),
            functional.batch_norm(image, None, None, training=True),
            torch.softmax(a, 1),
            functional.gelu(a),
            numbers(300, 1000).sum(0),
            numbers(70_000).sum(),
            torch.linalg.vector_norm(numbers(70_000)),
            # are subnormals flushed?
            torch.full((64,), 1e-40, dtype=torch.float32, device="cpu") * 0.5,
        ]
    checksum = 0
    for one in results:
        checksum = zlib.crc32(one.contiguous().numpy().tobytes(), checksum)
    return checksum
