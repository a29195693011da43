"""x"""

from harness.teach.articles import claim, memory, traffic, predicted

CLAIMS = [*memory.claims, *traffic.claims]
