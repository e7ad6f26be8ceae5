from __future__ import annotations

import pytest

from vitscale.engines.build import check_batch
from vitscale.errors import UserError


@pytest.mark.parametrize(
    ("global_batch", "world_size", "micro_batch", "expected"),
    [(96, 2, None, 48), (96, 2, 16, 16), (96, 1, 96, 96), (7, 7, 1, 1)],
)
def test_micro_batch(global_batch: int, world_size: int, micro_batch: int | None, expected: int) -> None:
    assert check_batch(global_batch, world_size=world_size, micro_batch=micro_batch) == expected


@pytest.mark.parametrize(
    ("global_batch", "world_size", "micro_batch", "message"),
    [
        (100, 3, None, "global_batch is 100, which 3 ranks do not divide; 99 or 102 would do"),
        (2, 3, None, "global_batch is 2, which 3 ranks do not divide; 3 would do"),
        (
            96,
            2,
            20,
            "engine.micro_batch is 20, but global_batch 96 over 2 ranks is 48 samples a rank, "
            "which it does not divide; 16 would do",
        ),
        (
            8,
            1,
            16,
            "engine.micro_batch is 16, but global_batch 8 over 1 rank is 8 samples a rank, "
            "which it does not divide; 8 would do",
        ),
        (
            8,
            1,
            0,
            "engine.micro_batch is 0, but global_batch 8 over 1 rank is 8 samples a rank, "
            "which it does not divide; 1 would do",
        ),
    ],
)
def test_numbers_that_do_not_divide(global_batch: int, world_size: int, micro_batch: int | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_batch(global_batch, world_size=world_size, micro_batch=micro_batch)
    assert caught.value.message == message
    assert caught.value.exit_code == 2
    suggested = int(message.split("; ")[1].split()[0])
    if micro_batch is None:
        check_batch(suggested, world_size=world_size, micro_batch=None)
    else:
        check_batch(global_batch, world_size=world_size, micro_batch=suggested)
