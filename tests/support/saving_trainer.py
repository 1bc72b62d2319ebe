"""The source of the smallest trainer class with a state to save, for a file next to a job."""

SAVING_TRAINER = """
class Counts:
    def setup(self, ctx): ...
    def configure(self, ctx): return {"steps": 0}
    def prepare_batch(self, raw, state, ctx): return raw
    def train_step(self, batch, state, ctx):
        from genlight.adapter import StepResult

        state["steps"] += 1
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return dict(state)
    def load_state_dict(self, state, payload, ctx): state.update(payload)
"""
