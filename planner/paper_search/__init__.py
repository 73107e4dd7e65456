"""The search under the closed formula of the SOSP'25 paper, and its lower bound."""
