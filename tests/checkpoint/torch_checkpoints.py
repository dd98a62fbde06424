"""Checkpoints written and read by torch.distributed.checkpoint, without its warnings about one process."""

import warnings

import torch.distributed.checkpoint as torch_dcp


def quiet_load(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def quiet_save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder
