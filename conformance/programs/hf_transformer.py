"""A tiny GPT-2 from Hugging Face transformers that learns to add: after "27+58=" comes "085".

python train.py --workload conformance/programs/hf_transformer.py --dropout 0.2
"""

import torch
import torch.nn.functional as F
from ddp_core import Workload
from transformers import GPT2Config, GPT2LMHeadModel

ALPHABET = "0123456789+="


def make_sums(numbers):
    """A dictionary of one tensor, [n, 9] character indices. The model's keyword for it is input_ids."""
    texts = [f"{left:02}+{right:02}={left + right:03}" for left, right in numbers]
    return {"input_ids": torch.tensor([[ALPHABET.index(character) for character in text] for text in texts])}


def answers(outputs, batch):
    """[n, 3, 12] logits of the answer's digits, each predicted from the characters before it, and the [n, 3] digits."""
    return outputs.logits[:, 5:8], batch["input_ids"][:, 6:]


class Addition(Workload):
    defaults = dict(epochs=3, global_batch_size=96, lr=3e-3, weight_decay=0.1, clip_norm=1.0, warmup_steps=10)

    def flags(self, add):
        add("--dropout", type=float, default=0.1, help="of embeddings, attention, outputs (default: %(default)s)")

    def data(self, config):
        order = torch.randperm(10_000, generator=torch.Generator().manual_seed(1))[:2400].tolist()
        numbers = [divmod(index, 100) for index in order]
        return make_sums(numbers[:1920]), make_sums(numbers[1920:])

    def model(self, config):
        dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout)
        sizes = dict(vocab_size=len(ALPHABET), n_positions=9, n_embd=32, n_layer=2, n_head=2)
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None, use_cache=False))

    def loss(self, outputs, batch):
        logits, digits = answers(outputs, batch)
        return F.cross_entropy(logits.flatten(0, 1), digits.flatten(), reduction="sum") / 3  # a row's loss: mean of 3 digits

    def metrics(self, outputs, batch):
        logits, digits = answers(outputs, batch)
        right = logits.argmax(-1) == digits
        return {"right_digits": (right.sum(), right.numel()), "right_sums": right.all(1).sum()}

    def optimizer(self, model, config):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]  # norms and biases: no weight decay
        groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=others, weight_decay=0.0)]
        return torch.optim.AdamW(groups, lr=config.lr)

    def schedule(self, step, total_steps, config):
        """Linear warm-up, then linear decay, like transformers' get_linear_schedule_with_warmup."""
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        return (total_steps - step) / (total_steps - config.warmup_steps)
