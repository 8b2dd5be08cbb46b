"""The goldens on a mesh; a file of its own, so that it runs beside the other goldens."""

import json
import subprocess
import sys

from tests.model.shared import GOLDEN

ROOT = GOLDEN.parents[1]


def test_goldens_hold_on_a_mesh_of_eight_devices():
    """In a process of its own: the number of devices is fixed when JAX starts."""
    program = (
        "import sys; from serving.cli import main; "
        "sys.exit(main(['check', '--simulate-devices', '8', '--mesh', 'data=2,tensor=2,expert=2', *sys.argv[1:]]))"
    )
    directories = ["--json", *(str(GOLDEN / name) for name in ("v3", "llm_7b"))]
    done = subprocess.run(
        [sys.executable, "-c", program, *directories], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["status"] for row in json.loads(done.stdout)] == ["ok", "ok"]
