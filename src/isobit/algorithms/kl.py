"""Three estimators of KL(pi || reference) from tokens sampled by pi: k1, k2 and k3 of J. Schulman,
"Approximating KL divergence" (joschu.net/blog/kl-approx.html).  With rho = reference(token) /
pi(token):

    k1 = -log rho                   unbiased, high variance, negative for about half of the tokens
    k2 = (log rho)^2 / 2            biased (small while the two are close), low variance, never
                                    negative
    k3 = (rho - 1) - log rho        unbiased, low variance, never negative; GRPO's penalty (arXiv
                                    2402.03300, equation 4)

The value and the gradient are different matters.  As a term of the loss, differentiated through log
pi only, the expected gradient is

    k1   0: it penalises nothing
    k2   that of KL(pi || reference), the divergence one wants
    k3   that of KL(reference || pi), the other direction

because E[grad log pi] = 0, and the gradients are log(1/rho) grad log pi for k2 and (1 - rho) grad
log pi for k3.
"""

import torch

from isobit.config.algorithm import KlEstimator


def k1(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """``log pi - log reference`` of each token, [N]: unbiased, of either sign."""
    return log_probs - reference_log_probs


def k2(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """Half the square of the log ratio of each token, [N]: biased, with the gradient of KL(pi ||
    reference).
    """
    return 0.5 * (log_probs - reference_log_probs).square()


def k3(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """``rho - 1 - log rho`` of each token, [N]: unbiased and never negative, with the gradient of
    KL(reference || pi).
    """
    log_ratio = reference_log_probs - log_probs
    return torch.expm1(log_ratio) - log_ratio


def token_kl(
    estimator: KlEstimator, log_probs: torch.Tensor, reference_log_probs: torch.Tensor
) -> torch.Tensor:
    """The named estimate of each token, [N]: see the functions above."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](log_probs, reference_log_probs)
