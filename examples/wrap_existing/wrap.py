"""Train an existing trainer class with a plain Lightning Trainer: ``python examples/wrap_existing/wrap.py``."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from genlight.adapter import ArrowDataModule, ContractModule, TrainingJobSpec

runs, parquet = Path("runs/wrap_existing"), Path(__file__).parents[1] / "digits" / "digits.parquet"

job = TrainingJobSpec(run_id="classifier", max_steps=600, hyperparams={"lr": 0.005, "warmup_steps": 20})
module = ContractModule("existing:DigitClassifier", job)
data = ArrowDataModule(str(parquet), batch_size=64, shuffle=True)
best = ModelCheckpoint(runs / "checkpoints", monitor="train/loss", every_n_train_steps=100)
callbacks = [best, LearningRateMonitor(logging_interval="step")]
trainer = Trainer(max_steps=job.max_steps, accelerator="cpu", callbacks=callbacks, logger=CSVLogger(runs))
trainer.fit(module, data)
print(f"{trainer.global_step} steps, accuracy {trainer.callback_metrics['train/accuracy']:.3f}, {best.best_model_path}")
