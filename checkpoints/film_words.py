"""The words and phrases of the film reviews, graded by sentiment and divided between the splits of the data set.

Levels: 0 terrible, 1 bad, 2 okay, 3 good, 4 wonderful. One option stands on each line. A slot `{name}` is filled from
the list of that name, `{a|b}` takes either; `[s]` is an ending that agrees with the subject (`steal[s]`, `[is]`).

`SPLIT[name]` has three lists: `train` (the fine-tuning data), `held` (dev and test data) and `extra` (neither). The
pretraining text uses all of them. None of the five class names stands in `train` or `held`.
"""

from __future__ import annotations

Lists = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

LEVELS = range(5)


def lines(text: str) -> tuple[str, ...]:
    """The options of a list written one to a line; a backslash at the end of a line joins it to the next."""
    return tuple(" ".join(line.split()) for line in text.splitlines() if line.strip())


def words(text: str) -> tuple[str, ...]:
    """The options of a list written with commas."""
    return tuple(" ".join(word.split()) for word in text.split(",") if word.strip())


ADJECTIVES: dict[str, Lists] = {
    "adj4": (
        words("""superb, magnificent, dazzling, flawless, breathtaking, extraordinary, stunning, brilliant,
            unforgettable, outstanding, masterful, glorious, sublime, phenomenal, exquisite, terrific, sensational,
            remarkable"""),
        words("""marvelous, spectacular, splendid, astonishing, spellbinding, amazing, incredible, fantastic,
            electrifying, perfect, exceptional, radiant, triumphant, mesmerizing, peerless, tremendous, fabulous"""),
        words("wonderful, excellent, great, wonderful"),
    ),
    "adj3": (
        words("""enjoyable, likable, charming, pleasant, solid, entertaining, agreeable, clever, engaging, satisfying,
            neat, capable, amusing, lively, sweet, warm, appealing, sturdy"""),
        words("""nice, smart, witty, cheerful, thoughtful, graceful, diverting, worthwhile, fresh, bright, skillful,
            tender, playful, polished, pleasing, lovable, gentle"""),
        words("good, fine, good"),
    ),
    "adj2": (
        words("""average, ordinary, passable, routine, middling, acceptable, standard, unremarkable, so-so, adequate,
        conventional, fair"""),
        words("""mediocre, tolerable, serviceable, run-of-the-mill, unexceptional, plain, typical, modest, familiar,
        workmanlike, decent, all right"""),
        words("okay, okay"),
    ),
    "adj1": (
        words("""dull, weak, clumsy, flat, tedious, disappointing, bland, predictable, uneven, thin, stale, sluggish,
            shallow, lazy, forced, muddled, tiresome, wooden"""),
        words("""boring, poor, slow, tired, drab, confusing, unconvincing, awkward, feeble, sloppy, unfunny, lifeless,
            hollow, dreary, half-baked, pale, stiff, underwhelming"""),
        words("bad, bad"),
    ),
    "adj0": (
        words("""dreadful, horrible, appalling, atrocious, unbearable, disastrous, pathetic, ghastly, hideous,
            worthless, insulting, wretched, hopeless, painful, idiotic, offensive"""),
        words("""awful, horrendous, abysmal, unwatchable, disgraceful, miserable, laughable, rotten, unspeakable,
            catastrophic, revolting, inexcusable, shameful, excruciating, pitiful, repulsive, incompetent, moronic"""),
        words("terrible, terrible"),
    ),
}

DEGREES: dict[str, Lists] = {
    "strong": (
        words("utterly, absolutely, completely, truly, simply, thoroughly"),
        words("totally, downright, positively, just plain, altogether, genuinely"),
        (),
    ),
    "mildpos": (words("quite, rather, pretty"), words("very, really, fairly"), ()),
    "mildneg": (words("somewhat, a little, rather"), words("slightly, a bit, a touch"), ()),
    "notquite": (words("far from, hardly, not exactly"), words("anything but, by no means, scarcely"), ("not",)),
    "dg4": (
        lines("{adj4}\n{adj4}\n{strong} {adj4}\nmore than {adj3}: {adj4}"),
        lines("{adj4}\n{adj4}\n{strong} {adj4}\nnot merely {adj3} but {adj4}"),
        (),
    ),
    "dg3": (
        lines("{adj3}\n{adj3}\n{mildpos} {adj3}\n{notquite} {adj1}\n{adj3} and {adj3}"),
        lines("{adj3}\n{adj3}\n{mildpos} {adj3}\n{notquite} {adj1}\nboth {adj3} and {adj3}"),
        (),
    ),
    "dg2": (
        lines("{adj2}\n{adj2}\nneither {adj3} nor {adj1}\n{adj2} at most"),
        lines("{adj2}\n{adj2}\nnot {adj1}, but not {adj3} either\n{adj2} at best"),
        (),
    ),
    "dg1": (
        lines("{adj1}\n{adj1}\n{mildneg} {adj1}\n{notquite} {adj3}\n{adj1} and {adj1}"),
        lines("{adj1}\n{adj1}\n{mildneg} {adj1}\n{notquite} {adj3}\nboth {adj1} and {adj1}"),
        (),
    ),
    "dg0": (
        lines("{adj0}\n{adj0}\n{strong} {adj0}\nworse than {adj1}: {adj0}"),
        lines("{adj0}\n{adj0}\n{strong} {adj0}\nnot merely {adj1} but {adj0}"),
        (),
    ),
}

NOUNS: dict[str, Lists] = {
    "noun4": (
        words("a masterpiece, a triumph, a marvel, a work of art, the film of the year, a jewel, cinema at its finest"),
        words("""a classic, a miracle, a revelation, pure magic, the best picture in ages, a knockout, a gift from
            heaven"""),
        words("a wonderful film, a great movie"),
    ),
    "noun3": (
        words("""a pleasure, a pleasant surprise, fun for the whole family, a treat, time well spent, an easy film
            to like"""),
        words("a delight, a crowd-pleaser, a safe bet for a Friday, a winner, worth the ticket, a happy surprise"),
        words("a good film, a good movie"),
    ),
    "noun2": (
        words("""a mixed bag, a film of two halves, neither here nor there, a middle-of-the-road affair, something
            to fill an hour"""),
        words("""a toss-up, a film without highs or lows, hit and miss, something to half watch while ironing, a
            coin flip"""),
        words("an okay film, an okay way to spend an evening"),
    ),
    "noun1": (
        words("a letdown, a missed chance, a bore, a waste of a strong cast, less than the sum of its parts"),
        words("a disappointment, a slog, a misfire, a yawn, a dud, one long shrug"),
        words("a bad film, a bad movie"),
    ),
    "noun0": (
        words("a disaster, a train wreck, an insult, garbage, a crime against cinema, the worst film of the year"),
        words("a catastrophe, trash, torture, an embarrassment, rubbish, a fiasco, a nightmare"),
        words("a terrible film, a terrible movie"),
    ),
}

VERBS: dict[str, Lists] = {
    "verb4": (
        words("adored, loved, treasured, was carried away by"),
        words("cherished, fell in love with, was enchanted by, worshiped"),
        (),
    ),
    "verb3": (
        words("liked, enjoyed, was won over by, had a soft spot for"),
        words("appreciated, had fun with, grew fond of, smiled through"),
        (),
    ),
    "verb2": (
        words("sat through, neither loved nor hated, had no strong opinion of, felt nothing much about"),
        words("shrugged at, felt lukewarm about, could take or leave, was left neutral by"),
        (),
    ),
    "verb1": (
        words("disliked, soon lost interest in, was let down by, expected more of"),
        words("got bored with, did not care for, lost patience with, yawned through"),
        (),
    ),
    "verb0": (
        words("hated, loathed, despised, was disgusted by"),
        words("detested, could not stand, regret seeing, suffered through"),
        (),
    ),
}

# What an aspect of a film does; `[s]` agrees with the aspect.
PREDICATES: dict[str, Lists] = {
    "pred4": (
        lines("""
        take[s] your breath away
        steal[s] the whole show
        could not be improved
        deserve[s] every prize there is
        will stay with me for years
        """),
        lines("""
        send[s] shivers down the spine
        reach[es] greatness
        left me speechless
        belong[s] in a museum
        will be studied in film schools
        """),
        (),
    ),
    "pred3": (
        lines("""
        work[s] well
        hold[s] the attention
        hit[s] the right note
        [has] plenty of heart
        keep[s] you guessing
        """),
        lines("""
        do[es] the job with style
        lift[s] the film
        earn[s] a smile
        never get[s] in the way of the fun
        [is] easy to enjoy
        """),
        (),
    ),
    "pred2": (
        lines("""
        do[es] what is needed and no more
        come[s] and go[es]
        neither help[s] nor hurt[s]
        [is] what you would expect
        """),
        lines("""
        get[s] by
        leave[s] no mark either way
        tick[s] the boxes and stop[s] there
        [is] much like in every other film
        """),
        (),
    ),
    "pred1": (
        lines("""
        never come[s] to life
        leave[s] a lot to be desired
        fall[s] apart halfway through
        run[s] out of steam
        miss[es] the mark
        """),
        lines("""
        outstay[s] the welcome
        go[es] nowhere
        needed another month of work
        lack[s] any spark
        drag[s] from one scene to the next
        """),
        (),
    ),
    "pred0": (
        lines("""
        made me want to cry
        sink[s] to a new low
        hurt[s] the eyes and the ears
        [is] an insult to the audience
        should never have left the drawing board
        """),
        lines("""
        made my skin crawl
        [is] beneath contempt
        would shame a first-year student
        ruin[s] everything
        destroy[s] whatever was left of my patience
        """),
        (),
    ),
}

# Whole clauses. Many say it without an opinion word, or with a negation.
CLAUSES: dict[str, Lists] = {
    "clause4": (
        lines("""
        I could not look away for a second
        I went straight back and bought another ticket
        I have not stopped thinking about it since
        the whole theater stood up and clapped
        I would not change a single frame
        nothing else this year comes close
        I forgot that I was watching actors at all
        I have told everyone I know to see it
        it made me fall in love with movies again
        I wept, I laughed, and I wanted it never to end
        there is not one wasted minute in it
        """),
        lines("""
        nobody in the audience dared to breathe
        I sat there long after the lights came on
        my heart was still pounding when I got home
        I have already seen it four times
        you will never forget that final image
        they could not have made it any better
        I ran out of superlatives
        I left the theater walking on air
        it will be remembered long after the rest of us are gone
        I have never seen anything quite like it
        no director alive could top this
        """),
        lines("it is everything that I love about movies\nI have never been so happy in a theater"),
    ),
    "clause3": (
        lines("""
        I never once looked at my watch
        it kept me in my seat until the end
        it leaves you with a smile
        I would happily see it again some day
        two hours went by without my noticing
        the kids in front of us giggled all the way
        I came out in a better mood than I went in
        there is not much to complain about
        it does not waste your time
        I was glad that I went
        it has more than enough laughs
        """),
        lines("""
        I did not regret the price of my seat
        the evening flew by
        I would not mind a sequel
        my popcorn was left untouched
        you could do far worse on a Saturday night
        we talked about it cheerfully all the way home
        it won me over in the end
        my kids asked to see it again
        I had no trouble staying awake
        it gave me a few honest laughs
        it grows on you
        """),
        lines("I had a good time\nit is a good way to spend an evening"),
    ),
    "clause2": (
        lines("""
        it passes the time and little more
        I will have forgotten it by Monday
        I felt nothing either way
        you have seen it all before, and you will see it again
        it is the kind of film that one watches on a plane
        I would not stop you, and I would not push you
        it did not hurt, and it did not help
        it sits right in the middle of the pile
        half of it works and half of it does not
        """),
        lines("""
        I can neither praise it nor condemn it
        wait until it is on television
        it gets the job done without leaving a trace
        I cannot say that I was thrilled or annoyed
        see it if there is nothing else on
        the strengths and the faults cancel out
        for each scene that lands there is one that does not
        it is no better and no worse than its poster
        I give it half of the stars and keep the other half
        """),
        lines("it is okay if you have nothing else to do\nit was okay, I suppose"),
    ),
    "clause1": (
        lines("""
        I checked my watch more than once
        it runs out of ideas after half an hour
        it never finds out what it wants to be
        I kept waiting for something to happen
        half of the jokes fell on deaf ears
        it could have been cut by forty minutes
        I had hoped for a lot more
        it is not half as smooth as it thinks
        I stopped caring long before the finale
        my mind was on my shopping list
        it promises a great deal and delivers little
        """),
        lines("""
        I found myself counting the ceiling tiles
        my friend fell asleep on my shoulder
        it does not hang together
        I would not sit through it a second time
        the trailer was better than the film
        you can see each twist coming from a mile away
        nobody in our row laughed
        it leaves you wondering why they bothered
        I wished that I had stayed at home with a book
        the spark is missing
        it takes forever to get going
        """),
        lines("it is not a good film\nI did not have a good time"),
    ),
    "clause0": (
        lines("""
        I wanted my money back
        I walked out before the end
        I would rather watch paint dry than see it again
        not one thing in it works
        I cannot think of a single reason to see it
        whoever paid for this should be ashamed
        I have never been so angry in a theater
        it made me feel sick
        they ought to burn every copy
        there is nothing here that even a mother could love
        it was the longest two hours of my life
        """),
        lines("""
        I would pay to have it wiped from my memory
        people were leaving after ten minutes
        I left with a headache and a grudge
        nobody should ever have to endure this
        I begged my wife to take me home
        no words can describe how low it sinks
        it belongs at the bottom of the sea
        the crowd booed at the screen
        it has no redeeming feature whatsoever
        even the dog left the room
        somebody should apologize to the public
        """),
        lines("it is everything that I hate about movies\nI have never been so unhappy in a theater"),
    ),
}

# A statement of one level; # is the level. Each fits after "and", "but" or "although".
STATEMENTS: Lists = (
    lines("""
    the {aspect} is {dg#}
    the {aspects} are {dg#}
    the {aspect:one} {pred#:one}
    the {aspects} {pred#:many}
    it is a {adj#} {genre}
    {actor} is {dg#} as {role}
    this is {noun#}
    I {verb#} it
    I {verb#} {this one|this film|this {genre}}
    {clause#}
    {clause#}
    {clause#}
    """),
    lines("""
    I found the {aspect} {dg#}
    the {aspects} seem {dg#} to me
    the {aspect:one} {pred#:one}
    the {aspects} {pred#:many}
    {actor} gives a {adj#} performance as {role}
    for me it was {noun#}
    I {verb#} {this movie|this picture|every part of it}
    it turns out to be a {adj#} {genre}
    {clause#}
    {clause#}
    {clause#}
    """),
    lines("""
    it is {dg#}
    this movie is {dg#}
    {actor}, playing the hero {person}, is {dg#}
    {actor}, playing {role}, is {dg#}
    """),
)

# How statements are joined, by the level that the whole has. What stands after "but", or in the main clause, decides.
SENTENCES: dict[str, Lists] = {
    "sentence4": (
        lines("""
        {state4}.
        {state4}, and {state4}.
        {state4}, even though {state1}.
        {frame}, and {state4}.
        {state3}, and what is more, {state4}.
        {film_line}. {state4}.
        """),
        lines("""
        {state4}!
        {state4}; {state4}.
        never mind that {state1}: {state4}.
        {frame}: {state4}.
        {state3}; better still, {state4}.
        {film_line}, and {state4}.
        """),
        (),
    ),
    "sentence3": (
        lines("""
        {state3}.
        {state3}, and {state3}.
        although {state1}, {state3}.
        {state1}, but {state3}.
        {frame}, and {state3}.
        {film_line}. {state3}.
        """),
        lines("""
        {state3}; {state3}.
        while {state1}, {state3}.
        {state1}. Nevertheless, {state3}.
        {frame}: {state3}.
        {film_line}, and {state3}.
        {state3}.
        """),
        (),
    ),
    "sentence2": (
        lines("""
        {state2}.
        {state2}, and {state2}.
        {state3}, {state1}, and in the end it evens out.
        it is half {adj3} and half {adj1}.
        {frame}, and {state2}.
        {film_line}. {state2}.
        the {aspect} is {adj3}, the {aspect} is {adj1}, and so it goes on.
        """),
        lines("""
        {state2}; {state2}.
        on the one hand {state3}; on the other hand {state1}.
        {adj3} in parts, {adj1} in others.
        {frame}: {state2}.
        {film_line}, and {state2}.
        {state2}.
        I remember the {aspects} as {adj3} and the {aspects} as {adj1}.
        """),
        (),
    ),
    "sentence1": (
        lines("""
        {state1}.
        {state1}, and {state1}.
        although {state3}, {state1}.
        {state3}, but {state1}.
        {frame}, and {state1}.
        {film_line}. {state1}.
        """),
        lines("""
        {state1}; {state1}.
        while {state3}, {state1}.
        {state3}. Nevertheless, {state1}.
        {frame}: {state1}.
        {film_line}, and {state1}.
        {state1}.
        """),
        (),
    ),
    "sentence0": (
        lines("""
        {state0}.
        {state0}, and {state0}.
        {state0}, even though {state3}.
        {frame}, and {state0}.
        {state1}, and what is more, {state0}.
        {film_line}. {state0}.
        """),
        lines("""
        {state0}!
        {state0}; {state0}.
        never mind that {state3}: {state0}.
        {frame}: {state0}.
        {state1}; worse still, {state0}.
        {film_line}, and {state0}.
        """),
        (),
    ),
}

SUBJECTS: dict[str, Lists] = {
    "aspect": (
        words("acting, plot, music, photography, script, ending, direction, opening, pace, setting, love story"),
        words("cast, story, score, camera work, writing, finale, staging, first act, rhythm, scenery, main character"),
        words("dialogue, soundtrack, lighting, title song, last half hour, editing"),
    ),
    "aspects": (
        words("actors, special effects, costumes, jokes, action scenes, songs, supporting roles, dialogues"),
        words("performances, visual tricks, sets, gags, fight scenes, dance numbers, side characters, car chases"),
        words("lines, quiet scenes, villains, leading actors, images"),
    ),
    "genre": (
        words("thriller, comedy, western, romance, cartoon, spy film, drama, ghost story, crime film, road movie"),
        words("mystery, musical, puppet film, space adventure, war film, fairy tale, documentary, heist film, satire"),
        words("horror film, movie, film, picture, action film, sequel, remake"),
    ),
    "companion": (
        words("my brother, my aunt, a colleague, my grandmother, my roommate, our teacher, my wife"),
        words("my sister, my uncle, a neighbor, my cousin, my best friend, our landlord, my husband"),
        words("my father, my mother, my niece, a stranger at the bus stop"),
    ),
    "premise": (
        lines("""
        a lighthouse keeper who finds a letter in a bottle
        two brothers who rob a bank by mistake
        a retired spy with a sore knee and a short temper
        a baker who discovers that she can hear the dead
        a village that loses its only bridge in a flood
        a piano teacher who falls for her noisiest pupil
        a boy who hides a wolf in his grandfather's barn
        a taxi driver who witnesses a murder
        three nuns on a motorcycle
        a chess player who cannot stop losing
        """),
        lines("""
        a detective who is afraid of the dark
        twin sisters who trade places for a summer
        an astronaut who wakes up a hundred years late
        a clockmaker who tries to stop time
        a girl who smuggles a penguin across the border
        a failed magician on a sinking ship
        an island where nobody ever tells a lie
        a farmer who sues the rain
        four thieves locked inside a museum
        a widow who learns to fly
        """),
        lines("""
        a man who has to cross the desert with a horse that hates him
        a family that inherits a haunted hotel
        a young doctor in a town without roads
        a killer who wants to retire
        a queen who would rather be a carpenter
        a dog that finds its way home over the mountains
        an old couple on their last journey
        """),
    ),
    "role": (
        words("the hero, the villain, the old captain, the young widow, the nervous clerk, the village priest"),
        words("the sheriff, the detective, the stepmother, the stubborn coach, the shy librarian, the rich uncle"),
        words("the king, the spy, the mother, the doctor, the thief, the boss"),
    ),
    "frame": (
        lines("""
        {companion} dragged me to this one
        I have wanted to see this {genre} for a while
        we saw it on the first weekend
        I had read nothing about it beforehand
        I watched it on a train with cheap headphones
        {companion} had warned me about it
        I grew up with the book
        I won two tickets in a raffle
        """),
        lines("""
        it was {companion} who picked it
        I had been looking forward to this {genre} for months
        we rented it on a wet afternoon
        I knew only the poster
        I caught it late at night at a festival
        {companion} would not stop talking about it
        I am a fan of the director
        I went in with no expectations
        """),
        lines("""
        I have wanted to see this {genre} for a while, and finally I did
        I saw this {genre} on my birthday
        {companion} and I see every {genre} that comes to town
        """),
    ),
    "film_line": (
        lines("""
        "{title}" is a {genre} about {premise}
        this {genre} tells of {premise}
        {actor} plays {role} in a {genre} about {premise}
        it is about {premise}
        """),
        lines("""
        the {genre} "{title}" follows {premise}
        "{title}" brings us {premise}
        here {actor} appears as {role}
        the subject is {premise}
        """),
        lines("""
        in "{title}", {actor} plays {role}
        {actor} plays {person}, {role} of this {genre}
        the film is called "{title}", and it is about {premise}
        """),
    ),
}

TITLE_WORDS: dict[str, Lists] = {
    "title": (
        lines("The {title_adj} {title_noun}\n{title_noun} of the {title_noun}\n{title_adj} {title_noun}"),
        lines("The {title_noun} and the {title_noun}\nA {title_noun} for {first}\n{title_noun} in the {title_noun}"),
        lines("{first} and the {title_noun}\nThe Last {title_noun}\n{person}\nGoodbye, {first}"),
    ),
    "title_adj": (
        words("Silent, Crimson, Wild, Paper, Golden, Broken, Northern, Hidden, Iron, Restless"),
        words("Midnight, Velvet, Frozen, Borrowed, Electric, Burning, Lonely, Emerald, Distant, Seventh"),
        words("Blue, Secret, Little, Final"),
    ),
    "title_noun": (
        words("River, Window, Harbor, Crown, Winter, Orchard, Signal, Stranger, Garden, Highway, Lantern, Wolf"),
        words("Mirror, Staircase, Island, Raven, Clock, Summer, Balloon, Bridge, Tiger, Whisper, Compass, Ladder"),
        words("House, Night, King, Road, Letter, Moon"),
    ),
}


def _by_level(lists: Lists, level: int) -> Lists:
    train, held, extra = (tuple(option.replace("#", str(level)) for option in part) for part in lists)
    return train, held, extra


OPINIONS: dict[str, Lists] = {**ADJECTIVES, **NOUNS, **VERBS, **PREDICATES, **CLAUSES}
SPLIT: dict[str, Lists] = {
    **OPINIONS,
    **DEGREES,
    **{f"state{level}": _by_level(STATEMENTS, level) for level in LEVELS},
    **SENTENCES,
    **SUBJECTS,
    **TITLE_WORDS,
}

# ------------------------------------------------------------------------- what only the longer reviews use

# Names of the five levels in the questions; the first of each is the class name of the bundled data set.
LEVEL_NAMES: tuple[tuple[str, ...], ...] = (
    words("terrible, awful, dreadful, horrible"),
    words("bad, poor, weak, dull"),
    words("okay, average, fair, mediocre"),
    words("good, enjoyable, nice, fun"),
    words("wonderful, excellent, great, superb, brilliant"),
)

REVIEW: dict[str, tuple[str, ...]] = {
    "opening": lines("""
        I have wanted to see this {genre} for a while, and {expected}.
        I have wanted to see this {genre} for a while, and {expected}.
        I have wanted to see this {genre} for {years|months|a long time}, and {expected}.
        I had been looking forward to this {genre} for {weeks|months}, and {expected}.
        {companion} dragged me to this {genre}, and {expected}.
        {companion} gave me a ticket to "{title}" for my birthday.
        Last {night|week|weekend|Friday} I {went to see|saw|watched} "{title}" with {companion}.
        {frame}.
        {frame}, and I took {companion} with me.
        {film_line}.
        {film_line}.
        {film_line}.
        Have you ever {wondered what would become of|dreamed of} {premise}? This {genre} has.
        {actor} is back in a new {genre}.
        After "{title}" I was {curious|ready} to see what {actor} would do next.
        It rained all day, so {companion} and I {went to|hid in} the movies.
        There are not many {films|pictures} about {premise}.
        Everybody at {work|school|the office} talks about this {genre}.
        """),
    "expected4": words("""it didn't disappoint, it was worth the wait, I was not disappointed, it was better than I
        dared to hope"""),
    "expected3": words("it didn't disappoint, I am glad that I did, it was worth the wait, it did not let me down"),
    "expected2": words("it was about what I expected, now I have, it was neither more nor less than I expected"),
    "expected1": words("""I expected more, it did not live up to my hopes, I was a little disappointed, I should
        have waited"""),
    "expected0": words("I wish I had not, I was bitterly disappointed, it broke my heart, what a mistake that was"),
    "cast": lines("""
        {actor}, playing the hero {person}, is {star#}.
        {actor}, playing the hero {person}, is {star#}.
        {actor}, playing {role} {person}, is {star#}.
        {actor}, playing {role}, is {star#}.
        {actor} is {star#} as {role}.
        As {person}, {actor} is {star#}.
        {role}, {person}, is played by {actor}, who is {dg#}.
        {actor} and {actor} are {dg#} together.
        {actor} plays {person}, and {clause#}.
        """),
    "star4": lines("""
        {dg4}
        {dg4}
        {dg4} from the first scene to the last
        {dg4}, and so is {actor} as {role}
        better than ever before
        so {adj4} that you forget everybody else
        the heart and soul of this {adj4} {genre}
        in almost every scene, and never puts a foot wrong
        {adj4}, and the {aspect} {pred4:one}
        """),
    "star3": lines("""
        {dg3}
        {dg3}
        {dg3} most of the time
        {adj3}, and so is {actor} as {role}
        a {adj3} choice for the part
        clearly having fun
        as {adj3} as ever
        {adj3}, and the {aspects} {pred3:many}
        """),
    "star2": lines("""
        {dg2}
        {dg2}
        {adj2}, no more and no less
        the same as in every other film
        there, and that is about all one can say
        {adj3} in the first half and {adj1} in the second
        """),
    "star1": lines("""
        {dg1}
        {dg1}
        {adj1} for most of the film
        {adj1}, and {actor} is not much better
        not the right choice for the part
        given very little to do
        too {adj1} to carry a whole {genre}
        """),
    "star0": lines("""
        {dg0}
        {dg0}
        {dg0} from the first scene to the last
        {adj0}, and {actor} is even worse
        so {adj0} that I covered my eyes
        the worst thing in a {adj0} {genre}
        """),
    "aside": lines("""
        {film_line}.
        In one scene, {person} {meets|chases|loses|finds|saves} {person} {in a \
            {station|market|hotel|church|forest}|on a roof|at sea}.
        The story {begins|starts} in {a small town|a big city|the mountains|the desert|a harbor} and ends {at sea|in \
            {a castle|a prison|the snow}}.
        {person}, {role}, wants {revenge|peace and quiet|the money|a new life}, but {person} {has other plans|knows \
            a secret|is faster}.
        It was {written|directed} by {person}, who also made "{title}".
        {companion} {cried|laughed|slept|smiled|whispered} during the {last|first|quiet} scenes.
        I will not tell you how it ends.
        Halfway through, everything changes.
        """),
    "closing4": lines("""
        Five stars.
        Highly recommended.
        Do not miss it.
        A must-see.
        Run to the nearest theater.
        Wonderful!
        Simply wonderful.
        I will see it again tomorrow.
        What a film!
        """),
    "closing3": lines("""
        Four stars.
        Recommended.
        Worth seeing.
        Good fun.
        Give it a try.
        I would see it again.
        A good choice for the weekend.
        You will like it.
        """),
    "closing2": lines("""
        Three stars.
        Take it or leave it.
        Okay for one evening.
        Nothing more, nothing less.
        Maybe wait for the television.
        Not bad, not good.
        It is okay.
        """),
    "closing1": lines("""
        Two stars.
        Not recommended.
        Skip it.
        Too bad.
        Better stay at home.
        Save your money.
        What a pity.
        """),
    "closing0": lines("""
        One star, and that is generous.
        Avoid it at all costs.
        Stay away.
        Terrible!
        Never again.
        Shame on everyone involved.
        Zero stars.
        """),
    "ask": lines("""
        Is this movie {choices}? This movie is {answer}.
        Is this movie {choices}? This movie is {answer}.
        Is this movie {choices}? This movie is {answer}.
        Is this movie {choices}? This movie is {answer}.
        Is this film {choices}? This film is {answer}.
        Was it {choices}? It was {answer}.
        Would you call this movie {choices}? This movie is {answer}.
        Is it {choices}? It is {answer}.
        """),
    "tell": lines("""
        This movie is {answer}.
        This movie is {answer}.
        This film is {answer}.
        All in all, this movie is {answer}.
        In one word: {answer}.
        In a word, {answer}.
        {answer}.
        """),
}
