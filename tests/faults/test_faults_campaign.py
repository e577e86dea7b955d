"""A short, seeded part of the fault campaign, and proof that it sees what it looks for."""

import numpy as np
import pytest
from campaign import Round, Struck, markdown, run_campaign, summary
from campaign_pipeline import fingerprint

from lattqe.errors import CorruptDataError
from lattqe.store import FeatureWriter


@pytest.mark.s3
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_lose_nothing_and_change_nothing():
    """`make faults` strikes the whole pipeline on several nodes; here it is the import, which needs no Ray."""
    rounds = run_campaign([21], rounds=2, seconds=300, faults=4, nodes=0, verbs="import")
    assert [each.problem for each in rounds] == ["", ""], summary(rounds)
    assert sum(each.injected for each in rounds) >= 2, summary(rounds)


def test_a_flipped_byte_or_a_trace_of_the_work_is_no_good_end(tmp_path):
    with FeatureWriter(str(tmp_path / "set"), 4) as writer:
        writer.append(np.eye(4), list("abcd"))
    assert fingerprint(str(tmp_path / "set")) == fingerprint(str(tmp_path / "set"))
    (tmp_path / "set" / "_work").mkdir()
    (tmp_path / "set" / "_work" / "plan.json").write_text("{}")
    with pytest.raises(RuntimeError, match="left behind"):
        fingerprint(str(tmp_path / "set"))
    (tmp_path / "set" / "_work" / "plan.json").unlink()
    part = tmp_path / "set" / "part-00000.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CorruptDataError):
        fingerprint(str(tmp_path / "set"))


def test_the_table_counts_what_struck_and_what_came_too_late():
    rounds = [Round(1, "import", [Struck("disk full", 3, True, ""), Struck("clock jumps", 9, False, "")], [2, 0]),
              Round(2, "search", [Struck("disk full", 3, True, "")], [0], problem="LOST: the bytes differ")]
    lines = [line.split() for line in summary(rounds).splitlines()]
    assert ["disk", "full", "2", "1", "1", "0"] in lines
    assert ["clock", "jumps", "0", "0", "0", "1"] in lines
    assert "1 were run again, 1 times" in summary(rounds)
    assert "| disk full | 1 | 1 | 2 | 1 | 1 | 0 |" in markdown(rounds)
    assert "| clock jumps | 0 | 0 | 0 | 0 | 0 | 1 |" in markdown(rounds)
