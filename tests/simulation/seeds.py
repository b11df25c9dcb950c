"""Seeds that once broke a rule, each with the shortest story that did: one line, as `python -m simulation` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.job import Setup
from simulation.plan import Fault


@dataclass(frozen=True)
class Seed:
    """The rule that was broken, and how."""

    rule: str
    seed: int
    setup: Setup
    faults: list[Fault]


SEEDS = [
    Seed("liveness", 1013, Setup(nodes=2, slots=2, step_s=1.0, persist_every=2, copy_s=0.8, keep_last=2, latency_s=0.005,
                                 faults_s=60.0), []),
    Seed("liveness", 11827269, Setup(nodes=4, slots=2, step_s=1.0, persist_every=2, copy_s=0.1, keep_last=2, latency_s=0.15,
                                     faults_s=60.0), []),
    Seed("liveness", 5, Setup(nodes=1, persist_every=3, faults_s=60.0),
         [Fault(40.0, "restart all nodes", 0, 0.0), Fault(46.2, "kill rank at a point", 0, 18 / 12 + 0.01)]),
    Seed("a restore takes the newest", 41,
         Setup(nodes=1, slots=3, step_s=1.0, persist_every=2, copy_s=0.1, keep_last=1, latency_s=0.005, faults_s=60.0),
         [Fault(11.72, "kill rank"), Fault(24.10, "kill rank"), Fault(34.08, "kill agent"), Fault(34.20, "kill rank"),
          Fault(44.12, "kill agent"), Fault(47.31, "kill rank", 1), Fault(47.49, "kill rank", 1), Fault(52.28, "kill rank"),
          Fault(54.32, "kill agent", 1), Fault(57.03, "kill rank", 1)]),
    Seed("liveness", 700002023, Setup(nodes=2, slots=2, step_s=1.0, persist_every=5, copy_s=0.8, latency_s=0.15),
         [Fault(19.22, "kill rank", 427, 0.27), Fault(84.85, "cut one way", 984, 0.43)]),
    Seed("liveness", 700003008, Setup(nodes=4, slots=2, step_s=3.0, persist_every=5, copy_s=0.1, keep_last=1, latency_s=0.15),
         [Fault(26.527378067369, "resize", 279, 0.9444119170239933),
          Fault(149.5595393604226, "cut between nodes", 960, 0.33355298658677146),
          Fault(154.4482256141185, "restart node", 217, 0.40205637927532856),
          Fault(184.81144846013638, "other job", 836, 0.7330293035117952),
          Fault(254.42447653412543, "cut between nodes", 537, 0.6133020794627592)]),
    # other nodes take a number that was never claimed, and one that had it comes back with what it holds
    Seed("one state per id", 1, Setup(nodes=2, spares=2, persist_every=5, step_s=3.0, copy_s=0.1, faults_s=200.0),
         [Fault(27.0, "cut from root", 0, 0.2), Fault(27.0, "cut from root", 1, 0.2), Fault(29, "kill rank"),
          Fault(46.0, "restart node", 0, 0.14), Fault(46.0, "restart node", 1, 0.14), Fault(67.0, "restart node", 2, 0.9)]),
    # the same, and both run on: the persister of the one that was overtaken claims nothing late, and commits nothing
    Seed("nothing that retention protects is deleted", 76,
         Setup(nodes=2, spares=2, slots=3, step_s=1.0, persist_every=1, persist_s=20, copy_s=0.8, latency_s=0.15),
         [Fault(232.4389408821682, "others take over", 303, 0.8023773956466232),
          Fault(240.56566138509427, "kill rank", 911, 0.3833278204238907)]),
    Seed("one committed state per id", 24,
         Setup(nodes=2, per_node=2, spares=2, slots=3, step_s=10.0, persist_every=12, copy_s=0.1, latency_s=0.15),
         [Fault(1.3197498465292168, "restart node", 528, 0.7423815265924102),
          Fault(46.84511671255033, "others take over", 957, 0.7997431615247124)]),
    # an index that was damaged under an open intent, where slots are let go of between two attempts: they were never counted
    Seed("liveness", 4001, Setup(nodes=4, spares=4, slots=2, step_s=3.0, persist_every=5, copy_s=0.8, discards=0.03,
                                 keep_last=2, keep_every=20, latency_s=0.15),
         [Fault(19.088056584209866, "other job", 389, 0.4195405346036767),
          Fault(71.58875504321524, "other job", 904, 0.3034790674830975),
          Fault(112.61021530244696, "restart all nodes", 783, 0.21524591610979504),
          Fault(117.04803376338614, "messages come twice", 230, 0.4135945272619821),
          Fault(128.55598857122692, "other job", 243, 0.3863390525170538),
          Fault(141.35334168706234, "restart all nodes", 137, 0.06915069136211394),
          Fault(141.67353271146956, "restart all nodes", 12, 0.01044476483224277),
          Fault(142.2197016874852, "messages come twice", 540, 0.2405702729674961),
          Fault(154.36901201001, "keep mark", 231, 0.8753050940054756),
          Fault(154.59839933451997, "operator truncates", 292, 0.7681227176654974),
          Fault(156.65317448927428, "operator truncates", 222, 0.2617271230005347),
          Fault(162.67607751055024, "restart all nodes", 489, 0.09710019122768354),
          Fault(169.00553288644468, "keep mark", 387, 0.20116532390516162),
          Fault(174.4365063981262, "storage lies", 384, 0.921127123950356),
          Fault(189.06547403039423, "slow node", 588, 0.6016032311324238),
          Fault(198.63560513880387, "messages come twice", 926, 0.05413999083896737),
          Fault(210.85233839429236, "pause node", 124, 0.5583519427233727),
          Fault(215.11968760793724, "keep mark", 466, 0.13914791815446725),
          Fault(268.87821307611637, "operator truncates", 661, 0.17439316668827332),
          Fault(294.5555395832822, "restart all nodes", 959, 0.3693278922453811)]),
    # a fresh start left in memory what only the root knew to be rolled back, and the next start took it
    Seed("nothing that was rolled back is restored", 4007,
         Setup(nodes=1, per_node=2, step_s=3.0, persist_every=12, copy_s=0.8, discards=0.03, keep_last=2, latency_s=0.15),
         [Fault(15.360468244016001, "others take over", 883, 0.1659452829380721),
          Fault(25.156746706299494, "others take over", 61, 0.268781842532822),
          Fault(59.182382829477206, "others take over", 368, 0.5843538427356021),
          Fault(61.14340650739079, "others take over", 163, 0.9445354949761973),
          Fault(150.32404206024543, "others take over", 416, 0.547706795682337)]),
    # retention had chosen what to delete when the job went back to one of these
    Seed("nothing that retention protects is deleted", 26,
         Setup(nodes=2, spares=2, step_s=3.0, persist_every=12, copy_s=0.8, discards=0.03, keep_last=1, latency_s=0.15),
         [Fault(31.818839757306772, "others take over", 676, 0.14379138065332342),
          Fault(115.07593635436795, "roll back", 297, 0.6600515164874513)]),
    # a snapshot that was held while the root was asked, emptied by a restore, and never let go of: no slot was left to write
    Seed("liveness", 555024504, Setup(nodes=4, spares=4, slots=2, step_s=1.0, persist_every=2, copy_s=0.8, latency_s=0.15),
         [Fault(66.79618184928835, "storage forgets", 626, 0.6881338883953242),
          Fault(92.3822727355669, "kill persister at a point", 563, 0.44862635957545616),
          Fault(102.37254096542794, "kill agent", 898, 0.13412338407533297),
          Fault(129.91424764607245, "restart node", 544, 0.7797773145282116),
          Fault(140.22631614348313, "kill persister at a point", 186, 0.6623131051604199),
          Fault(149.28135510276692, "restart node", 27, 0.1749293295739357),
          Fault(165.8805841479585, "restart node", 321, 0.15009745092708604),
          Fault(215.7508544893898, "restart node", 476, 0.26407482873331833)]),
    # the listing of a node's own proposals lagged: it gave a newer one a lower number, and nobody ever read that
    Seed("liveness", 912, Setup(nodes=2, spares=2, slots=2, step_s=1.0, persist_every=2, persist_s=20, copy_s=0.8, keep_last=2,
                                latency_s=0.15, faults_s=150.0),
         [Fault(23.380180059678572, "listings lag", 315, 0.32452943199817197),
          Fault(32.08144992574873, "listings lag", 767, 0.9158865930293677),
          Fault(89.65645343917507, "listings lag", 113, 0.9954181662875167)]),
    # machines that the job had left abandoned whatever it decided: they had begun later generations without the root
    Seed("liveness", 969, Setup(nodes=2, spares=3, slots=2, step_s=1.0, persist_every=2, copy_s=0.8, latency_s=0.15, faults_s=40.0),
         [Fault(14.274906310468229, "listings lag", 447, 0.4329450200070144),
          Fault(18.431420440296208, "others take over", 292, 0.7979945653272773),
          Fault(26.14608255994637, "others take over", 433, 0.31817346916401745)]),
    # a decision on replicas that swung between two answers: the thread that follows it never waited again
    Seed("time passes", 234877252, Setup(nodes=3, spares=3, replicate=1, step_s=10.0, persist_every=12, copy_s=0.1, discards=0.03, keep_last=2, latency_s=0.15),
         [Fault(29.56542680559361, "cut between nodes", 601, 0.5053299776829261),
          Fault(116.05665880792586, "resize", 115, 0.03881585257505704),
          Fault(252.5071239172466, "cut between nodes", 99, 0.29302962986210135)]),
    # a node that decides, of which not all have heard yet: its thread never waited again
    Seed("time passes", 234877323, Setup(nodes=4, spares=4, slots=4, replicate=2, step_s=10.0, persist_every=1, persist_s=20, copy_s=0.8),
         [Fault(32.39733285724071, "keep mark", 23, 0.28041380670542193),
          Fault(34.78897688536043, "restart node", 354, 0.6468436419446622),
          Fault(82.72457536395409, "keep mark", 547, 0.15108063566632957),
          Fault(103.52993718624465, "keep mark", 622, 0.2477647735002152),
          Fault(109.89233479716253, "restart node", 314, 0.39019694476079503),
          Fault(176.1646278927898, "restart node", 273, 0.639285400996464),
          Fault(183.0416306163647, "keep mark", 766, 0.3302564368011486),
          Fault(252.8838993184011, "restart node", 716, 0.5182646137355017)]),
    # a start claimed a number and died; memory took the same one, and all that came behind it counted as overtaken for ever
    Seed("liveness", 17,
         Setup(nodes=4, slots=2, step_s=1.0, persist_every=2, copy_s=0.1, discards=0.03, keep_last=1, keep_every=20,
               latency_s=0.15, faults_s=40.0),
         [Fault(3.496950040711, "step back", 35, 0.19131742230399185),
          Fault(5.625364165817794, "kill rank", 436, 0.5070497257316973),
          Fault(6.301190731955173, "kill rank", 133, 0.7396222112368396),
          Fault(10.832150210077675, "kill rank", 590, 0.0038414763258808327),
          Fault(14.54352281672923, "kill rank", 495, 0.11289858528038033),
          Fault(14.910071190308628, "kill rank", 301, 0.9363349470879135),
          Fault(16.69264883578257, "kill rank", 69, 0.4570459461283094),
          Fault(16.7895879151814, "step back", 104, 0.30934065370848407),
          Fault(17.89634190659257, "step back", 926, 0.8779342900725483),
          Fault(20.812505111256957, "step back", 643, 0.737455821669774),
          Fault(21.815756073494335, "kill rank", 543, 0.6363258758691062),
          Fault(24.001411176379577, "step back", 588, 0.9945220333532792),
          Fault(24.456362882969465, "kill rank", 689, 0.22085476329454734),
          Fault(26.772881414938627, "step back", 156, 0.461259447536035),
          Fault(27.11305635424415, "step back", 669, 0.35132400762375326),
          Fault(32.64437968609383, "kill rank", 810, 0.9410397437385712),
          Fault(38.22410398111599, "step back", 524, 0.039242460211314056),
          Fault(38.770498682519076, "kill rank", 246, 0.27588000375266597),
          Fault(39.74893204809638, "kill rank", 75, 0.14603835958786215),
          Fault(39.861122894569746, "kill rank", 630, 0.2222948835258043)]),
    # an operator deletes a folder in which two nodes have leases: both renew theirs, which is no take-over
    Seed("a commit is left to who has its lease", 430851957,
         Setup(nodes=4, spares=1, slots=2, step_s=10.0, persist_every=1, persist_s=20, copy_s=0.1, keep_last=1, keep_every=20,
               latency_s=0.6, quiet_s=5.0),
         [Fault(10.424390808209871, "storage denies", 232, 0.8565062337487943),
          Fault(120.9215663801785, "kill rank at a point", 116, 0.3287520907442566),
          Fault(186.6778563204315, "operator deletes", 269, 0.10668756774657517)]),
    # a node sat out the generation that rolled a snapshot back, and that it was abandoned had been swept when it was back
    Seed("nothing that was rolled back is committed", 329862960,
         Setup(nodes=3, step_s=1.0, persist_every=1, persist_s=20, copy_s=0.1, keep_last=1, keep_every=20),
         [Fault(9.423157519873959, "resize", 169, 0.18177028779027105),
          Fault(150.31952257674214, "resize", 326, 0.42910034483154424)]),
    # a start died behind its claim of a number, and the next one, which took the same from memory, never asked the root
    Seed("a restore takes the newest", 3501000019,
         Setup(nodes=1, per_node=2, step_s=3.0, persist_every=12, copy_s=0.8, keep_last=1, latency_s=0.15),
         [Fault(45.48246788747443, "storage lies", 191, 0.9014419642084318),
          Fault(73.35089828364954, "other job", 79, 0.04926007654417741),
          Fault(81.42894060167096, "step back", 326, 0.8531757919223525),
          Fault(83.93735201196664, "step back", 772, 0.23989077429684447),
          Fault(137.23181634929782, "other job", 290, 0.5137519271633829),
          Fault(143.4310783547686, "step back", 397, 0.5286977291266098),
          Fault(146.8486614154448, "other job", 284, 0.14070767064864909),
          Fault(158.20066380609762, "step back", 499, 0.1532775657828539),
          Fault(162.25549629627994, "other job", 462, 0.39949766242790763),
          Fault(163.33314420367478, "step back", 706, 0.9929566045438138),
          Fault(176.88471110750382, "other job", 856, 0.33139961725090983),
          Fault(215.92292327682046, "step back", 22, 0.5082315684426637)]),
    # a write that failed was there; with two slots the node let go of it, the others committed it, and it was proposed for ever
    Seed("liveness", 3505000038,
         Setup(nodes=2, per_node=2, slots=2, step_s=3.0, persist_every=5, copy_s=0.8, keep_every=20, latency_s=0.005),
         [Fault(2.558968982513632, "storage forgets", 974, 0.9173763570325413),
          Fault(9.24658618959382, "storage forgets", 798, 0.4520539972214903),
          Fault(30.871619366657665, "storage forgets", 17, 0.6599083471530408),
          Fault(57.95472115192315, "storage forgets", 36, 0.126510494002245),
          Fault(81.78417956241312, "storage forgets", 9, 0.2582766988241678)]),
    # credentials were refused, and a node that joined lacked its part: a start began from nothing beside what is on storage
    Seed("a fresh start asks the root", 8,
         Setup(nodes=2, slots=2, step_s=1.0, persist_every=2, copy_s=0.8, keep_last=1, votes=True, faults_s=150.0),
         [Fault(13.166132874605175, "storage denies", 261, 0.5327679979630014),
          Fault(32.164998070662584, "preemption", 187, 0.06444932863920605)]),
    # storage was away for half a minute: a machine that the job had left long ago took at once what it still held
    Seed("a moment's failure costs no steps", 150,
         Setup(nodes=1, per_node=2, slots=2, step_s=1.0, persist_every=2, copy_s=0.8, latency_s=0.15, votes=True, faults_s=150.0),
         [Fault(43.7, "restart node", 0, 0.9), Fault(120.0, "storage is gone", 491, 0.2), Fault(122.0, "restart node", 1, 0.98)]),
    # a node was lost behind a commit that its replicas had not come to: older memory was taken, and the root not asked
    Seed("a restore takes the newest", 399833128,
         Setup(nodes=3, replicate=1, step_s=1.0, persist_every=2, copy_s=0.8, keep_last=1, keep_every=20, latency_s=0.005, votes=True),
         [Fault(51.864650063010366, "cut one way", 253, 0.8405737863515907),
          Fault(57.00026521733651, "lose node for good", 447, 0.1479914988849046),
          Fault(91.95946830921793, "node is not replaced", 532, 0.06336097597693335)]),
    # one state further back, nothing older than the newest checkpoint covered the state: the job began again from nothing
    Seed("a restore takes the newest", 489925168,
         Setup(nodes=4, spares=1, step_s=10.0, persist_every=5, copy_s=0.8, discards=0.03, keep_last=1, latency_s=0.15, votes=True),
         [Fault(260.18428190358503, "a step fails", 401, 0.2544835079921961)]),
    # a rank discarded a persist step: its next snapshot, which nobody else had marked, was persisted by no other node
    Seed("a discarded step costs one interval", 1,
         Setup(nodes=2, spares=0, step_s=3.0, persist_every=5, copy_s=0.1, discards=0.1, latency_s=0.02, faults_s=100.0), []),
    # and again while they searched: who was late a second time named a step a whole interval ahead
    Seed("a discarded step costs one interval", 1,
         Setup(nodes=3, spares=0, step_s=3.0, persist_every=5, copy_s=0.1, discards=0.1, latency_s=0.005, faults_s=100.0), []),
    # a script emptied the root; persisters that started again read it before the ranks did, and nobody was told
    Seed("an emptied root is told of", 7, Setup(nodes=2, persist_every=20, step_s=1.0, copy_s=0.1, votes=True, faults_s=150.0),
         [Fault(30.0, "root is emptied", 1, 0.1), Fault(68.0, "root is emptied", 1, 0.9)]),
    # and again in the middle of a persist: all had written, and waited ten minutes for each other's indexes
    Seed("liveness", 7, Setup(nodes=2, persist_every=5, step_s=1.0, copy_s=0.1, votes=True, faults_s=60.0),
         [Fault(40.0, "root is emptied", 1, 0.1)]),
]  # fmt: skip
