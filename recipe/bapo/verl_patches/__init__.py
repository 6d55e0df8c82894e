# SPDX-License-Identifier: Apache-2.0
"""Changes of verl that have nothing to do with BAPO: attention, fused heads, and a platform without a GPU."""
