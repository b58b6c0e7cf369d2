"""Hugging Face Trainer(optimizers=…): a checkpoint in the middle, resumed in a new Trainer, ends bit for bit like the whole run."""

import pytest
import torch

from rlx_optim.torch import AdamW, Muon, ScheduleFreeAdamW

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


def trainer(cls, folder, **settings):
    """A tiny Llama with random weights; nothing is downloaded."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(16, (24, 8), generator=torch.Generator().manual_seed(1))
    optimizer = cls(model, lr=0.01)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        eval_dataset=[{"input_ids": row, "labels": row} for row in tokens[:4]],
        optimizers=(optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)),
    )


@pytest.mark.parametrize("cls", [AdamW, Muon])
def test_resume_is_bitwise(cls, tmp_path):
    whole = trainer(cls, tmp_path)
    start = {k: p.detach().clone() for k, p in whole.model.named_parameters()}
    whole.train()
    resumed = trainer(cls, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    optimizer = resumed.optimizer.optimizer
    assert isinstance(optimizer, cls)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6}
    expected = dict(whole.model.named_parameters())
    for k, p in resumed.model.named_parameters():
        assert torch.equal(p, expected[k]), k
        assert not torch.equal(p, start[k]), k


@pytest.mark.parametrize("settings", [{}, {"eval_strategy": "steps", "eval_steps": 3}], ids=["saved at y", "saved at x"])
def test_schedule_free(settings, tmp_path):
    """Trainer calls eval and train of the optimizer by itself: the loss is that of the average, and resuming is bitwise whether
    the checkpoint was written in training or after an evaluation."""
    whole = trainer(ScheduleFreeAdamW, tmp_path, **settings)
    whole.train()
    optimizer = whole.optimizer.optimizer
    optimizer.train()
    y = {k: p.detach().clone() for k, p in whole.model.named_parameters()}
    resumed = trainer(ScheduleFreeAdamW, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    resumed.optimizer.optimizer.train()
    for k, p in resumed.model.named_parameters():
        assert torch.equal(p, y[k]), k
    found = whole.evaluate()["eval_loss"]
    with optimizer.averaged():
        tokens = torch.stack([row["input_ids"] for row in whole.eval_dataset])
        want = whole.model.eval()(input_ids=tokens, labels=tokens).loss
        assert not torch.equal(next(iter(whole.model.parameters())), next(iter(y.values())))
    assert found == pytest.approx(float(want), rel=1e-5)


def test_muon_knows_the_parts_of_a_language_model(tmp_path):
    model = trainer(AdamW, tmp_path).model
    report = Muon(model).routing_report().splitlines()[1:]
    rules = {line.split()[0]: line.split()[2] for line in report}
    assert [name for name, rule in rules.items() if rule == "Muon"] == [
        f"model.layers.0.{part}.weight"
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    assert rules["model.embed_tokens.weight"] == rules["lm_head.weight"] == "AdamW"
