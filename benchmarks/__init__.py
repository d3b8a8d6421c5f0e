"""Speed against peers and bare loops, as ratios measured in the same run."""
