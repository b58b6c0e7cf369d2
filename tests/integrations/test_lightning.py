"""Lightning: fit with a checkpoint in the middle, fit(ckpt_path=…) with new objects: bit for bit as without the break."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rlx_optim.torch import AdamW, Muon, ScheduleFreeAdamW, Sophia

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # its advice on workers and loggers


class Net(lightning.LightningModule):
    def __init__(self, cls):
        super().__init__()
        self.cls = cls
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, _):
        x, y = batch
        return (self.body(x) - y).pow(2).mean()

    def configure_optimizers(self):
        optimizer = self.cls(self.body, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Curved(Net):
    """Sophia by hand: estimates through what self.optimizers() gives."""

    def __init__(self):
        super().__init__(Sophia)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        optimizer.update_hessian(lambda: super(Curved, self).training_step(batch, _), every=2)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, _))
        optimizer.step()

    def configure_optimizers(self):
        return Sophia(self.body, lr=0.01)


def fitted(make, folder, path=None, steps=6, **settings):
    torch.manual_seed(0)
    model = make()
    x = torch.randn(12, 6)
    saver = lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if isinstance(model, Curved) else 1.0,
        **settings,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=4), ckpt_path=path)
    return model, trainer.optimizers[0]


class Averaged(Net):
    """The recipe: the optimizer follows the model into evaluation and back."""

    seen = ()

    def __init__(self):
        super().__init__(ScheduleFreeAdamW)

    def configure_optimizers(self):
        return ScheduleFreeAdamW(self.body, lr=0.01)

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        for optimizer in self.trainer.optimizers:
            optimizer.eval()

    def on_validation_model_train(self):
        super().on_validation_model_train()
        for optimizer in self.trainer.optimizers:
            optimizer.train()

    def validation_step(self, batch, _):
        self.seen = [p.detach().clone() for p in self.parameters()]


@pytest.mark.parametrize("path", [None, "step=3.ckpt"])
def test_schedule_free(path, tmp_path):
    """Validation is at the average, training goes on from y, and a checkpoint is as good as any."""
    x = torch.randn(4, 6)
    data = DataLoader(TensorDataset(x, x[:, :3]), batch_size=4)
    Averaged.val_dataloader = lambda self: data
    whole, optimizer = fitted(Averaged, tmp_path / "whole", val_check_interval=1)
    y = [p.detach().clone() for p in whole.parameters()]
    with optimizer.averaged():
        assert all(map(torch.equal, whole.parameters(), whole.seen))
        assert not all(map(torch.equal, whole.parameters(), y))
    other, _ = fitted(Averaged, tmp_path / "other", path and str(tmp_path / "whole" / path), limit_val_batches=int(path is None))
    assert all(map(torch.equal, other.parameters(), y))


@pytest.mark.parametrize("make", [lambda: Net(AdamW), lambda: Net(Muon), Curved], ids=["AdamW", "Muon", "Sophia"])
def test_resume_is_bitwise(make, tmp_path):
    whole, _ = fitted(make, tmp_path / "whole")
    torch.manual_seed(0)
    start = list(make().parameters())
    resumed, optimizer = fitted(make, tmp_path / "resumed", path=str(tmp_path / "whole" / "step=3.ckpt"))
    for p, q, s in zip(whole.parameters(), resumed.parameters(), start, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, s)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6}
    if isinstance(optimizer, Sophia):
        assert {float(state["estimates"]) for state in optimizer.state.values()} == {3}


@pytest.mark.parametrize("cls", [AdamW, Muon])
def test_mixed_precision_may_clip(cls, tmp_path):
    """Lightning refuses to clip where the optimizer says that it unscales by itself."""
    model, optimizer = fitted(lambda: Net(cls), tmp_path, precision="bf16-mixed")
    assert {float(state["step"]) for state in optimizer.state.values()} == {6}
    assert all(torch.isfinite(p).all() for p in model.parameters())
