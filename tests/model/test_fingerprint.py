"""Two directories have one fingerprint exactly when they hold the same model, as far as it looks."""

from pathlib import Path

from model.fingerprint import fingerprint


def write(directory: Path, **files: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name.replace("_", ".")).write_bytes(data)
    return directory


def test_it_tells_weights_and_configurations_apart(tmp_path: Path) -> None:
    weights = bytes(3 << 20)
    a = write(tmp_path / "a", config_json=b"{}", model_safetensors=weights)
    assert fingerprint(a) == fingerprint(write(tmp_path / "b", config_json=b"{}", model_safetensors=weights))
    others = [
        write(tmp_path / "c", config_json=b"{ }", model_safetensors=weights),
        write(tmp_path / "d", config_json=b"{}", model_safetensors=weights[:-1] + b"\1"),
        write(tmp_path / "e", config_json=b"{}", model_safetensors=b"\1" + weights[1:]),
        write(tmp_path / "f", config_json=b"{}", model_safetensors=weights + b"\0"),
        write(tmp_path / "g", config_json=b"{}", other_safetensors=weights),
    ]
    assert len({fingerprint(d) for d in (a, *others)}) == 6


def test_a_converted_model_is_known_by_its_manifest(tmp_path: Path) -> None:
    a = write(tmp_path / "a", config_json=b"{}", manifest_json=b"1", model_safetensors=b"x")
    b = write(tmp_path / "b", config_json=b"{}", manifest_json=b"1", model_safetensors=b"y")
    c = write(tmp_path / "c", config_json=b"{}", manifest_json=b"2", model_safetensors=b"x")
    assert fingerprint(a) == fingerprint(b) != fingerprint(c)
