"""One file a method: its formula as pure functions of tensors, run by both hosts.

A rule acts on W_Q and W_K beside the optimizer (locater, decoupled, qk_clip, decay) or changes the forward
(sigma_reparam the weights, qk_norm queries and keys, softcap the logits, z_loss their logsumexp). `control` runs it on
a model and its optimizer, `lab.engine` on a stack of models.
"""
