"""The figures of the paper and its table 1, reproduced: ``quarflow reproduce``, see experiments/README.md.

================  ==========================================================================================
`synthetic`       one model, one seed: training, its numbers, where they come from
`jobs`            many of these, side by side, kept once they are finished
`figure2` ..      which models a figure compares, its numbers and its picture
`table1`          four flows of images, by the runs of ``quarflow train``
`readme`          the tables of the README, from the results
`images`          MNIST and CIFAR-10 from scratch on one card
================  ==========================================================================================

These modules import quarflow; nothing in quarflow needs them but the command ``reproduce``.
"""
