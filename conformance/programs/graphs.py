"""A message-passing network on molecules of different sizes. It predicts a molecule's energy from atoms and bonds.

python train.py --workload conformance/programs/graphs.py
"""

import torch
from ddp_core import Workload
from torch import nn


def make_molecules(count, seed):
    """Yields dictionaries: atoms [n] of 5 kinds, bonds [2, n-1] (pairs of atoms), energy []: a sum over the bonds."""
    generator = torch.Generator().manual_seed(seed)
    for size in torch.randint(4, 17, (count,), generator=generator).tolist():
        atoms, later = torch.randint(5, (size,), generator=generator), torch.arange(1, size)
        earlier = (later * torch.rand(size - 1, generator=generator)).long()  # a tree: each atom is bound to an earlier one
        energy = (5 * atoms[earlier] + atoms[later]).sin().sum()
        yield dict(atoms=atoms, bonds=torch.stack([earlier, later]), energy=energy)


class MessagePassing(nn.Module):
    def __init__(self, width, rounds):
        super().__init__()
        self.atoms, self.head = nn.Embedding(5, width), nn.Linear(width, 1)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.SiLU()) for _ in range(rounds))

    def forward(self, atoms, bonds, molecule, molecules):
        state, (source, target) = self.atoms(atoms), bonds
        for message in self.messages:
            sent = message(torch.cat([state[source], state[target]], dim=1))
            state = state + sent.new_zeros(state.shape).index_add(0, target, sent)
        energies = self.head(state).squeeze(1)
        return energies.new_zeros(molecules).index_add(0, molecule, energies)


class Energies(Workload):
    defaults = dict(epochs=3, global_batch_size=48, optimizer="adamw", lr=3e-3, clip_norm=5.0)

    def data(self, config):
        return list(make_molecules(960, seed=1)), list(make_molecules(192, seed=2))

    def collate(self, rows):
        """One graph of many molecules: concatenated atoms, and bonds with indices shifted to match."""
        sizes = torch.tensor([len(row["atoms"]) for row in rows])
        bonds = [row["bonds"] + first for row, first in zip(rows, sizes.cumsum(0) - sizes, strict=True)]
        atoms, energy = (torch.cat([row[name].view(-1) for row in rows]) for name in ("atoms", "energy"))
        molecule = torch.arange(len(rows)).repeat_interleave(sizes)  # the molecule of each atom
        return dict(atoms=atoms, bonds=torch.cat(bonds, dim=1), molecule=molecule, energy=energy)

    def model(self, config):
        return MessagePassing(width=32, rounds=2)

    def forward(self, model, batch):
        return model(batch["atoms"], batch["bonds"], batch["molecule"], len(batch["energy"]))

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch["energy"], reduction="sum")

    def metrics(self, outputs, batch):
        return {"error_per_atom": ((outputs - batch["energy"]).abs().sum(), len(batch["atoms"]))}
