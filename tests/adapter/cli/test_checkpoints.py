"""``genlight checkpoint``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import CheckpointError
from genlight.callbacks.checkpoint import DurableCheckpointIO, RecordMeta, save
from genlight.callbacks.checkpoint.export import export_lightning
from support.messages import refusal


def call(*arguments):
    return main(["checkpoints", *map(str, arguments)])


@pytest.fixture
def checkpoints(tmp_path):
    directory = tmp_path / "checkpoints"
    for step in (10, 20):
        checkpoint = {
            "global_step": step,
            "state_dict": {"model.w": torch.full((4, 2), float(step)), "head.b": torch.zeros(3)},
            "hyper_parameters": {"width": 4, "path": {1, 2}},
            "genlight": {"state": {"best": 0.5}, "rng": []},
        }
        save(directory / f"step-{step:08d}", checkpoint, meta=RecordMeta(run_id="digits", metrics={"loss": 1 / step}))
    return directory


def test_a_listing_has_a_line_for_each_and_notices_files_of_the_wrong_size(checkpoints, capsys):
    (checkpoints / "step-00000015.json").write_text("{")
    os.truncate(checkpoints / "step-00000020" / "model.safetensors", 3)
    assert call("list", checkpoints) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "step-00000010", "step-00000015", "step-00000020"]
    assert all(word in lines[1] for word in ("digits", "loss=0.1"))
    assert "broken: its record step-00000015.json is not JSON" in lines[2]

    assert call("list", checkpoints.parent, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [10, None, 20]
    assert rows[2]["state"].startswith("broken: step-00000020/model.safetensors has 3 bytes")


def test_verify_checks_every_checkpoint_of_a_folder(checkpoints, capsys):
    assert call("verify", checkpoints) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["STATE", "loss=0.1", "loss=0.05"]
    with open(checkpoints / "step-00000010" / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert call("verify", checkpoints) == 1
    _, first, second = capsys.readouterr().out.splitlines()
    assert "broken: step-00000010/model.safetensors has digest" in first
    assert "intact" in second


def test_verify_takes_one_checkpoint(checkpoints, capsys):
    assert call("verify", checkpoints / "step-00000020", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["problem"]) == ("step-00000020", "")
    assert "finite_weights" in told


def test_show_lists_files_tensors_and_state_of_a_checkpoint_or_of_the_newest(checkpoints, capsys):
    assert call("show", checkpoints / "step-00000010") == 0
    text = capsys.readouterr().out
    assert "  step-00000010/model.safetensors: [" in text
    assert '  model.safetensors:model.w: ["F32", [4, 2]]' in text
    assert "  best: 0.5" in text

    assert call("show", checkpoints, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["state"]) == (20, {"best": 0.5})
    assert facts["tensors"]["model.safetensors:head.b"] == ["F32", [3]]


def test_export_as_lightning_checkpoint_loads_without_pickled_code(checkpoints, tmp_path):
    save(tmp_path / "plain", {"state_dict": {"w": torch.ones(2)}, "global_step": 3, "genlight": {"rng": [{1}]}})
    assert call("export", tmp_path / "plain", "--to", tmp_path / "out" / "a.ckpt") == 0
    loaded = torch.load(tmp_path / "out" / "a.ckpt", weights_only=True)
    assert set(loaded) == {"state_dict", "global_step"}
    assert loaded["state_dict"]["w"].sum() == 2


def test_export_as_safetensors_may_strip_a_prefix(checkpoints, tmp_path):
    assert call("export", checkpoints, "--to", tmp_path / "all.safetensors") == 0
    assert set(load_file(tmp_path / "all.safetensors")) == {"model.w", "head.b"}
    assert call("export", checkpoints, "--to", tmp_path / "part.safetensors", "--strip-prefix", "model.") == 0
    assert load_file(tmp_path / "part.safetensors")["w"].sum() == 160


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("show nowhere", 2, "there is nothing at nowhere"),
        ("verify empty", 2, "no checkpoint in empty"),
        ("export checkpoints", 2, "export needs --to"),
        ("export checkpoints/step-00000010 --to x.safetensors", 1, "is broken"),
        ("export checkpoints --to x", 2, "no configuration of a Hugging Face model"),
        ("export checkpoints --to x.pt", 2, "no configuration of a Hugging Face model"),
        ("export checkpoints --to x.ckpt --strip-prefix model.", 2, "--strip-prefix is for FILE.safetensors or FOLDER"),
        ("export checkpoints --to x.safetensors --strip-prefix net.", 2, "head.b, model.w"),
    ],
)
def test_an_impossible_request_is_reported_and_writes_nothing(
    checkpoints, tmp_path, monkeypatch, capsys, arguments, code, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.truncate(checkpoints / "step-00000010" / "model.safetensors", 3)

    assert call(*arguments.split()) == code
    error = capsys.readouterr().err
    assert error.startswith("genlight checkpoints: ")
    assert said in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "empty"]


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt"])
def test_an_existing_file_is_replaced_only_by_force(tmp_path, capsys, name):
    save(tmp_path / "plain", {"state_dict": {"w": torch.ones(2)}, "global_step": 3})
    (tmp_path / name).write_text("mine")
    assert call("export", tmp_path / "plain", "--to", tmp_path / name) == 2
    assert f"{name} exists; name another place, or replace it by --force" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"
    assert call("export", tmp_path / "plain", "--to", tmp_path / name, "--force") == 0
    assert (tmp_path / name).read_bytes() != b"mine"


def test_an_export_omits_and_names_objects_that_stock_torch_refuses(tmp_path, caplog):
    """Arrays in the state of a data module, for example, made torch and Lightning refuse the complete file."""
    state = {
        "global_step": 3,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"w": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"betas": (0.9, 0.999)}]}],
        "loops": {"fit_loop": {"state_dict": {"combined_loader": [np.arange(3)], "n": 1}, "epoch_progress": {"n": 1}}},
        "callbacks": {"Sound": {"best": 0.5}, "Array": {"scores": np.ones(2)}},
        "hyper_parameters": {"lr": 0.1, "root": Path("/data")},
        "GivenData": {"order": np.arange(4)},
        "genlight": {"state": {}, "rng": [np.arange(2)]},
    }
    save(tmp_path / "c" / "final", state)
    exported = export_lightning(tmp_path / "c" / "final", tmp_path / "x.ckpt")
    loaded = torch.load(exported)
    assert loaded["loops"] == {"fit_loop": {"state_dict": {"n": 1}, "epoch_progress": {"n": 1}}}
    assert loaded["callbacks"] == {"Sound": {"best": 0.5}}
    assert loaded["hyper_parameters"] == {"lr": 0.1}
    assert torch.equal(loaded["optimizer_states"][0]["state"][0]["exp_avg"], torch.ones(2))
    assert {"GivenData", "genlight"}.isdisjoint(loaded)
    (warning,) = [message for message in caplog.messages if "weights_only=True" in message]
    for name in ("loops.fit_loop.state_dict.combined_loader", "callbacks.Array", "hyper_parameters.root", "GivenData"):
        assert name in warning


@pytest.mark.parametrize("part", ["state_dict", "optimizer_states", "lr_schedulers"])
def test_an_export_that_torch_would_refuse_is_not_made(tmp_path, part):
    held = {"w": np.arange(3)} if part == "state_dict" else [{"w": np.arange(3)}]
    save(tmp_path / "c" / "final", {"global_step": 3, "state_dict": {"w": torch.ones(2)}, part: held})
    with refusal(CheckpointError):
        export_lightning(tmp_path / "c" / "final", tmp_path / "x.ckpt")
    assert not list(tmp_path.glob("*x.ckpt*"))


@pytest.fixture
def foreign_model(checkpoints):
    """The folder of a Hugging Face model next to checkpoints from another source."""
    folder = checkpoints / "genlight-pretrained" / "model"
    (folder / "templates").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "templates" / "chat.jinja").write_text("{{ 1 }}")
    return folder


def test_the_configuration_is_exported_with_its_folders(checkpoints, foreign_model, tmp_path):
    assert call("export", checkpoints, "--to", tmp_path / "out") == 0
    names = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.j*"))
    assert names == ["config.json", "templates/chat.jinja"]


@pytest.mark.parametrize(
    "plant",
    [
        lambda file, secret: file.symlink_to(secret),
        lambda file, secret: file.symlink_to(secret.parent),
        lambda file, secret: os.mkfifo(file),
        lambda file, secret: file.symlink_to("/dev/zero"),
        lambda file, secret: (file.touch(), os.truncate(file, 1 << 40)),
    ],
    ids=["link", "link to a folder", "pipe", "device", "sparse"],
)
def test_a_foreign_run_leads_an_export_to_no_other_file(checkpoints, foreign_model, tmp_path, capsys, plant):
    secret = tmp_path / "elsewhere" / "secret"
    secret.parent.mkdir()
    secret.write_text("canary")
    plant(foreign_model / "tokenizer.json", secret)
    assert call("export", checkpoints, "--to", tmp_path / "out") == 2
    assert "tokenizer.json is not exported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_linked_folder_of_configurations_is_not_read(checkpoints, foreign_model, tmp_path, capsys):
    foreign_model.parent.rename(tmp_path / "elsewhere")
    foreign_model.parent.symlink_to(tmp_path / "elsewhere")
    assert call("export", checkpoints, "--to", tmp_path / "out") == 2
    assert "there is no configuration of a Hugging Face model" in capsys.readouterr().err


def test_a_pipe_as_base_or_checkpoint_does_not_block(checkpoints, tmp_path):
    for name in ("base.safetensors", "a.ckpt"):
        os.mkfifo(tmp_path / name)
    assert call("export", checkpoints, "--to", tmp_path / "x.safetensors", "--base", tmp_path / "base.safetensors") == 2
    with refusal(FileNotFoundError):
        DurableCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
