"""``holdfast read`` names the columns that it has read."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.command.read import read_command


@pytest.mark.parametrize(
    ("header", "row", "names"),
    [
        ("step,loss", "{step},3.0", "loss"),
        ("step,loss,grad_norm", "{step},3.0,1.0", "loss, grad_norm"),
        ("step,loss,grad_norm", "{step},3.0,", "loss"),
        ("step,loss,grad_norm,lr,epoch", "{step},3.0,1.0,1e-3,0.5", "loss, grad_norm, lr, epoch"),
    ],
)
def test_the_columns_that_were_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str, row: str, names: str
) -> None:
    file = tmp_path / "curve.csv"
    file.write_text("\n".join([header, *(row.format(step=step) for step in range(1, 200))]) + "\n")
    assert read_command([str(file)]) == 0
    assert f"steps 1 to 199 ({names})" in capsys.readouterr().out
