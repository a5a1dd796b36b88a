"""The plots and words of the small stories.

A plot is a sequence of steps, a step a tuple of variants, one to a line; a step that begins with `?` may be left out.
`{A}` and `{B}` are the names of two children (or animals) of the story, `{Ahe} {Ahim} {Ahis} {Ahimself}` their \
    pronouns;
the slots named in `STICKY` keep their first value through a story. Everything else is as in `film_words.py`.
"""

from __future__ import annotations

from film_words import lines, words

STICKY = frozenset(words("thing, animal, place, food, elder, kin, color, helper, vehicle, plant, prize"))

WORDS: dict[str, tuple[str, ...]] = {
    "age": words("little, young, small, shy, curious, clever, cheerful, stubborn, dreamy, brave, quiet, lively"),
    "thing": words("""kite, red ball, wooden boat, silver key, music box, blue scarf, brass bell, picture book, yellow
        umbrella, lantern, toy train, drum, straw hat, glass marble, compass, paint box, whistle, teddy bear, fishing
        rod, telescope, wool blanket, rocking horse, magnet, leather bag, harmonica, puzzle, mirror, flute, wooden
        sword, tea set"""),
    "animal": words("""kitten, puppy, rabbit, duckling, hedgehog, pony, goat, owl, squirrel, turtle, lamb, fox cub,
        parrot, mouse, sparrow, donkey, frog, baby deer, goose, calf"""),
    "place": words("""the river, the old mill, the forest, the market, the harbor, the park, the meadow behind the
        school, the beach, the hill, the barn, the village square, the lake, the railway station, the castle ruins,
        the orchard, the bridge, the library, the cave by the sea, the playground, the windmill"""),
    "home": words("""a small village, a house by the sea, a narrow street, a farm, a tall gray house, a town between
        two hills, a cottage near the woods, a flat above a bakery, a cabin in the hills, a valley full of apple
        trees, a busy city"""),
    "food": words("""apple pie, honey cake, pancakes, vegetable soup, bread and butter, strawberry jam, cookies,
        roasted chestnuts, plum cake, cheese rolls, lemon tart, corn bread, noodles, rice pudding, gingerbread"""),
    "elder": words("""old farmer, baker, fisherman, librarian, gardener, postman, blacksmith, shopkeeper, old sailor,
        miller, nurse, music teacher, clockmaker, painter, grandmother next door"""),
    "kin": words("mother, father, grandmother, grandfather, aunt, uncle, big sister, big brother"),
    "helper": words("crow, beetle, gray cat, old dog, snail, blackbird, bee, heron, toad, wild goose"),
    "vehicle": words("bus, train, boat, cart, sled, tram, ferry, hay wagon, raft"),
    "plant": words("sunflower, pumpkin, apple tree, rose bush, bean, tulip, cherry tree, tomato plant, oak"),
    "prize": words("a silver cup, a basket of pears, a blue ribbon, a book of songs, a golden medal, a bag of marbles"),
    "color": words("red, blue, green, yellow, white, black, brown, silver, golden, purple, orange, gray"),
    "weather": words("""the sun was shining, it was raining, snow was falling, a cold wind blew, the sky was clear and
        blue, fog lay over the fields, dark clouds came over the hills, the air smelled of hay, the leaves were
        turning yellow, it was very hot, thunder rolled far away, the moon was bright"""),
    "when": words("""one morning, one evening, one day, one Sunday, on a summer afternoon, on the first day of spring,
        late in autumn, early one Saturday, in the middle of winter, before breakfast, after school, on market day,
        one windy day"""),
    "sad": words("sad, worried, lonely, disappointed, afraid, upset, cross, ashamed, nervous, close to tears"),
    "happy": words("""happy, proud, glad, cheerful, delighted, grateful, full of joy, as happy as a king, relieved,
        excited"""),
    "slowly": words("""slowly, carefully, quietly, at once, without a word, on tiptoe, as fast as possible, bravely,
        gently"""),
    "said": words("said, whispered, cried, called, shouted, laughed"),
    "asked": words("asked, whispered, wondered, called"),
    "look": words("""in the kitchen, behind the door, under the bed, in the garden, up in the attic, between the
        books, in every pocket"""),
    "game": words("hide and seek, marbles, tag, catch, pirates, chess, kings and queens, leapfrog, cards"),
    "big": words("big, tiny, round, heavy, strange, beautiful, rusty, shiny, old, soft"),
}

OPENINGS = lines("""
    Once upon a time there was {a {age} {kid_A}|a {kid_A}} named {A}, who lived in {home}.
    Once there lived a {age} {kid_A} in {home}. {Ahis} name was {A}.
    {A} was a {age} {kid_A} who lived with {Ahis} {kin} in {home}.
    In {home} there lived a {kid_A} called {A}, and next door lived {Ahis} best friend, {B}.
    {A} and {B} were best friends. They lived in {home}.
    There was once a {kid_A} named {A}, who loved {food} more than anything else.
    {when}, {A} woke up early because {weather}.
    {when}, when {weather}, {A} sat at the window and thought of {place}.
    Long ago, in {home}, a {kid_A} named {A} had a {thing} that {Ahe} took everywhere.
    {A} could not sleep. {weather}, and {Ahe} was thinking about tomorrow.
    "{Wake up|Get up|Come quickly}, {A}!" called {Ahis} {kin}. {weather}.
    Every {summer|winter|spring|Sunday}, {A} and {Ahis} {kin} went to {place}.
""")

PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (  # something is lost and found
        lines("""
        {A} had a {big} {thing}. It was a present from {Ahis} {kin}, and {Ahe} took very good care of it.
        More than anything else {A} loved {Ahis} {thing}. {Ahe} even took it to bed.
        The {thing} that stood on {A}'s shelf had once belonged to {Ahis} {kin}.
        """),
        lines("""
        {when}, the {thing} was gone. {A} looked {look} and {look}, but {Ahe} could not find it anywhere.
        But {when} {Ahe} came home from {place}, and the {thing} was not there. "Oh no!" {said} {A}. "I have lost it."
        Then, on the way to {place}, {Ahe} noticed that the {thing} was missing.
        """),
        lines("""
        {A} was very {sad}. {Ahe} asked {Ahis} {kin}, but {Ahis} {kin} had not seen it either.
        {Ahe} sat down on {the steps|a stone|the floor} and felt {sad}.
        "What is the matter?" asked {B}. "You look so {sad}." {A} told {Bhim} everything.
        """),
        lines("""
        ? "Let us go back the way you came," said {B}. "Two pairs of eyes are better than one."
        ? They asked the {elder}, who {shook his head|had not seen a thing|only pointed to {place}}.
        ? {B} came to help. They looked {look}, but all they found was a {big} {color} button.
        """),
        lines("""
        At last they went to {place}. There, under a {plant|bench|heap of leaves}, lay the {thing}!
        Just then a {helper} {hopped|came|flew} out of the grass. It had something in its mouth. It was the {thing}!
        In the evening the {elder} knocked at the door. "Does this belong to you?" {said} the {elder}, and held up \
            the {thing}.
        """),
        lines("""
        {A} was so {happy} that {Ahe} {danced around the room|hugged everybody|sang all the way home}.
        "Thank you!" {said} {A}. "I will never leave it behind again." And {Ahe} never did.
        From that day on {A} always put the {thing} back in its place.
        """),
    ),
    (  # a new friend
        lines("""
        {when}, a new family moved into the house across the road. Their {kid_B} was called {B}.
        There was a new {kid_B} in class. {Bhis} name was {B}, and {Bhe} spoke to nobody.
        At {place}, {A} saw a {kid_B} with a {color} {coat|hat|bag} who stood all alone.
        """),
        lines("""
        {A} wanted to say hello, but {Ahe} was too shy.
        The other children were playing {game} and did not look at {Bhim}.
        "I wonder what {Bhe} likes," thought {A}. "Perhaps {Bhe} likes {food}."
        """),
        lines("""
        So {Ahe} took {Ahis} {thing} and walked over {slowly}. "Would you like to play?" asked {A}.
        The next day {Ahe} brought {two pieces|a plate|a basket} of {food}. "This is for you," {Ahe} said.
        Then a ball rolled across the grass and stopped at {A}'s feet. {Ahe} kicked it back, and {B} smiled.
        """),
        lines("""
        {B} {looked at the ground|blushed|was silent for a while}, and then {Bhe} nodded. "I would love to," {Bhe} said.
        "My name is {B}," {Bhe} said. "I come from far away, and I do not know any games." "Then I will teach you," \
            {said} {A}.
        It turned out that {B} knew {a hundred jokes|all the names of the stars|how to walk on {Bhis} hands}.
        """),
        lines("""
        ? They played {game} until it was dark, and then they played {game} by the light of a lamp.
        ? {A} showed {Bhim} {place}, and {B} told {Ahim} about the town where {Bhe} was born.
        ? When it began to rain they hid under a {plant|bridge|big umbrella} and ate {food}.
        """),
        lines("""
        After that you never saw one without the other.
        "Today I made a friend," {A} told {Ahis} {kin} that evening, and {Ahe} was {happy}.
        And so {A} learned that a small word can be the beginning of something big.
        """),
    ),
    (  # a storm
        lines("""
        {when}, {A} and {B} took the {vehicle} to {place}.
        {A} was alone at home. {Ahis} {kin} had gone to {place} to buy {food}.
        The {vehicle} was already far from home when {A} noticed that {weather}.
        """),
        lines("""
        Suddenly the sky turned {black|gray|yellow}, and the wind began to howl. "A storm is coming," {said} {B}.
        Then there was a flash of lightning, and all the lights went out.
        The rain fell so hard that nobody could see the road. {A} was {sad}.
        """),
        lines("""
        "Do not be afraid," said {B}. "Take my hand." They ran {to a barn|under the bridge|into an old hut} and shut \
            the door.
        {A} lit a candle and counted the seconds between the lightning and the thunder.
        In the {barn|shed|hut} they found a {animal}, wet to the skin and shaking.
        """),
        lines("""
        ? They told each other stories to pass the time. {B} told one about a {elder} and a {helper}.
        ? There was only a little {food} left, and they shared it.
        ? The wind {banged the shutters|broke a window|blew the roof off the shed}, but they held on to each other.
        """),
        lines("""
        Little by little the storm moved away. The clouds opened, and {there was a rainbow over|the sun shone on} \
            {place}.
        At midnight it was over. {A} opened the door and saw {a sky full of stars|that the whole world was white}.
        Before long they heard a voice. It was the {elder} with a lantern, who had come to look for them.
        """),
        lines("""
        "Were you frightened?" asked {Ahis} {kin}. "Only a little," said {A}.
        They walked home through the puddles, wet and {happy}.
        Since then {A} likes the sound of rain on the roof.
        """),
    ),
    (  # something is broken
        lines("""
        On the shelf in the kitchen stood a {big} {color} {vase|bowl|jug|clock}. It belonged to {A}'s {kin}, and \
            nobody was allowed to touch it.
        {B} had a new {thing}, and {A} was allowed to {hold|carry|borrow} it for one day.
        {A} and {B} were playing {game} in the house, although they knew that they should not.
        """),
        lines("""
        {A} only wanted to look at it. But {Ahe} {slipped|stumbled over the {animal}|turned around too quickly}, and \
            crash! It lay on the floor in pieces.
        Then there was a loud noise. {A} looked down and {turned pale|held {Ahis} breath|did not dare to move}.
        {Ahe} ran too fast, fell over a root, and heard something crack.
        """),
        lines("""
        {A} was {sad}. "Perhaps nobody will notice," {Ahe} thought, and hid the pieces {look}.
        "It was the {animal}," {said} {A}. But that was not true, and {Ahe} felt {sad}.
        {Ahe} thought of running away to {place}, but {Ahis} legs were too heavy.
        """),
        lines("""
        ? All through supper {Ahe} could not eat a bite, not even the {food}.
        ? That night {A} dreamed of a {helper} that asked, "Who did it? Who did it?"
        ? "You are very quiet today," said {Ahis} {kin}.
        """),
        lines("""
        In the end {Ahe} told the truth. "I broke it," {Ahe} said. "I am so sorry."
        The next morning {A} went to {B} and said, "It was me. I will save my money and buy you a new one."
        Then {A} took a deep breath and told {Ahis} {kin} everything.
        """),
        lines("""
        {Ahis} {kin} was silent for a moment. "Thank you for telling me," came the answer. "Now fetch the glue, and \
            we will mend it together."
        "I was angry," said {B}, "but now I am glad that you told me." And they were friends again.
        The {elder} helped to repair it, and you had to look very closely to see the crack.
        """),
    ),
    (  # a race or a contest
        lines("""
        Every year there was a {race|contest} at {place}. The winner got {prize}.
        {when}, {A} saw a sign: "Great {race|kite contest|baking contest|swimming race} at {place}! First prize: \
            {prize}."
        {B} was the fastest runner in the village, and {Bhe} {knew it|told everybody so}.
        """),
        lines("""
        {A} had never won anything, but {Ahe} wanted to try.
        "You will never win," laughed {B}. "Your legs are too short."
        For weeks {A} practiced {before school|behind the barn|in the rain|from morning to night}.
        """),
        lines("""
        On the great day {weather}. All the people of the village had come, even the {elder}.
        When the day came, {A}'s knees were shaking. "Just do your best," said {Ahis} {kin}.
        "Ready, steady, go!" called the {elder}, and off they went.
        """),
        lines("""
        At first {B} was far ahead. But then {Bhe} {stopped to rest|took the wrong turn|slipped in the mud|lost a shoe}.
        Halfway there, {A} saw that {B} had fallen and hurt {Bhis} {knee|foot|arm}. {Ahe} stopped. "Can you stand \
            up?" {Ahe} asked.
        {A} did not look to the left or to the right. {Ahe} thought only of {prize}.
        """),
        lines("""
        They reached the finish arm in arm, and everybody cheered.
        In the end {A} was not the first, but {Ahe} was not the last either, and {Ahe} was {happy}.
        Nobody could believe it: {A} had won {prize}!
        {A} came second. "Next year we will see," {Ahe} said, and shook {B}'s hand.
        """),
        lines("""
        That evening there was {food} for everyone.
        "I should not have laughed at you," said {B}. "Will you teach me how you did it?"
        The {elder} said that it had been the best race in many years.
        """),
    ),
    (  # something grows
        lines("""
        {Ahis} {kin} gave {A} a {big} seed. "Put it into the earth and be patient," {said} {Ahis} {kin}.
        In a drawer {A} found a paper bag with one single seed in it.
        The {elder} sold {A} a seed for a penny. "Nobody knows what it will become," said the {elder}.
        """),
        lines("""
        {A} dug a hole in the garden, put in the seed, and watered it every day.
        {Ahe} planted it in an old pot and set it on the window sill.
        Every morning {Ahe} ran outside to see if something had changed. Nothing had.
        """),
        lines("""
        "It will never grow," said {B}. "Throw it away." But {A} shook {Ahis} head.
        Days went by, and weeks. {A} was {sad}, but {Ahe} did not give up.
        ? Then came a dry month, and {A} carried water from {place} with a bucket.
        """),
        lines("""
        {when}, there was a tiny green leaf. "Look!" {said} {A}. "Look, everybody!"
        At last something green came out of the earth, no bigger than a fingernail.
        Then it rained for three days, and on the fourth day a small plant stood there.
        """),
        lines("""
        It grew and grew until it was taller than the {shed|fence|house}. It was a {plant}.
        By the end of the summer it had become a fine {plant}, and a {helper} came to live in it.
        It was a {plant}, the most beautiful one in the whole street.
        """),
        lines("""
        Now {A} sits in its shade and eats {food} with {B}.
        {A} gave the seeds to all {Ahis} friends, and the next year there were flowers everywhere.
        "Some things need time," said {A}, and {Ahis} {kin} smiled.
        """),
    ),
    (  # an animal in need
        lines("""
        {when}, on the way to {place}, {A} heard a strange sound. It came from a {bush|ditch|hollow tree|pile of wood}.
        Near {place} a {animal} lay in the grass and could not get up.
        {A} found a {animal} that had lost its mother.
        """),
        lines("""
        It was a {animal}. One of its legs was hurt. "You poor thing," {said} {A}.
        The {animal} was {cold|hungry|wet|trembling}, and it looked at {A} with big dark eyes.
        "Go away, or it will bite you," said {B}. But {A} knelt down {slowly}.
        """),
        lines("""
        {Ahe} wrapped it in {Ahis} {scarf|coat|blanket} and carried it home.
        {A} ran to the {elder}, who knew everything about animals.
        {Ahe} made a bed of straw for it in a box and gave it {warm milk|a little water|some bread}.
        """),
        lines("""
        "May I keep it?" {asked} {A}. "Only until it is strong again," said {Ahis} {kin}.
        ? All night {A} sat beside it and sang {slowly}.
        ? {B} brought an old pillow and half of {Bhis} breakfast.
        ? They gave it a name: {pet}.
        """),
        lines("""
        After a week the {animal} could walk again. After two weeks it could run.
        Day by day it grew stronger, and soon it followed {A} everywhere, even to school.
        {when}, it ate everything in its bowl and wanted more.
        """),
        lines("""
        {A} knew that it was time to say goodbye. {Ahe} took it back to {place} and let it go. It looked back once.
        It stayed with {A} for the rest of its life, and they were never apart.
        Years later a {animal} sometimes comes to the fence and waits. {A} knows who it is.
        """),
    ),
    (  # fear
        lines("""
        {A} was afraid of {the dark|dogs|deep water|high places|the old house on the hill|spiders}, but {Ahe} did \
            not tell anyone.
        Nobody ever went to {place} at night. People said that a ghost lived there.
        "I dare you to go to {place} alone," said {B}.
        """),
        lines("""
        {when}, {B} lost {Bhis} {thing} there, and {sadly|of all people} only {A} was near.
        {A} swallowed hard. {Ahe} took {Ahis} {thing} and went {slowly}.
        That night {A} lay awake. There it was again: a knocking at the window.
        """),
        lines("""
        Something moved in the dark. Two {color} eyes shone. {A} wanted to scream, but no sound came out.
        {Ahis} heart beat like a drum. One step, two steps, three steps.
        "Who is there?" {asked} {A}. Nobody answered.
        """),
        lines("""
        But it was only a {animal}! It was more afraid than {Ahe} was.
        Then the moon came out, and {A} saw that the ghost was nothing but {a shirt on a line|an old tree|a torn \
            curtain}.
        "It is only me," said a voice. It was the {elder}, who was looking for the {animal}.
        """),
        lines("""
        {A} laughed until {Ahis} belly hurt.
        "I was wrong about you," said {B}. "You are the bravest of us all."
        Since that night {Ahe} has slept with the light off.
        """),
    ),
    (  # cooking and sharing
        lines("""
        It was the birthday of {A}'s {kin}, and {A} wanted to make {food}.
        {when}, {A} and {B} were hungry, but there was nothing in the house except {an egg|an onion|half a loaf of \
            bread}.
        The {elder} was ill, so {A} decided to bring some {food}.
        """),
        lines("""
        {Ahe} took flour, butter, and {three eggs|a spoon of honey|a pinch of salt}, and soon there was flour {on \
            the floor|in {Ahis} hair|everywhere}.
        They went from door to door. One neighbor gave them {milk|carrots|sugar}, another gave them {apples|beans|a \
            little butter}.
        "First we need a big pot," said {A}. {B} fetched one from the cellar.
        """),
        lines("""
        But {A} forgot the time, and smoke came out of the oven.
        Then the {animal} jumped on the table, and the bowl fell down.
        ? "It tastes of nothing," said {B}. "Something is missing." They thought for a while.
        """),
        lines("""
        {A} was {sad}, but {B} said, "Let us start again. I will help you."
        "Do not worry," said {Ahis} {kin}. "The second try is always better."
        So they {stirred|mixed|baked|cooked} once more, and this time they did everything {slowly}.
        """),
        lines("""
        The whole house smelled of {food}. Everybody came and sat down at the table.
        The {elder} took a bite, and then another one. "I have never eaten anything like it," said the {elder}.
        There was enough for all of them, and even the {helper} got a crumb.
        """),
        lines("""
        "It is better to share than to have it all for yourself," said {A}.
        When the plates were empty, they sang songs until late.
        And the recipe? {A} keeps it in a {thing|drawer|tin box} to this day.
        """),
    ),
    (  # a journey
        lines("""
        {A} had never seen the sea. "{when}," {Ahe} said, "I will go there."
        In the attic {A} found an old map. A red cross was drawn beside {place}.
        A letter came from far away. "Come and visit me," wrote {A}'s {kin}. "Bring your {thing}."
        """),
        lines("""
        So {Ahe} packed {Ahis} {thing} and some {food} and took the {vehicle}.
        {A} and {B} set out before the sun was up. They took the {vehicle} as far as it went, and then they walked.
        {Ahe} asked {B} to come along. "Only if there is {food}," said {B}.
        """),
        lines("""
        On the way they met a {elder} who had lost {the way|a shoe|a hat}. They helped, and the {elder} gave them a \
            {big} {color} stone.
        The road went up and down, past {place}, through a dark wood, and over a river.
        "Are we lost?" {asked} {B}. "No," said {A}, but {Ahe} was not sure.
        """),
        lines("""
        ? At night they slept in a barn, and a {animal} kept them warm.
        ? Then the {vehicle} broke down, and they had to wait for hours.
        ? A {helper} showed them a shortcut.
        """),
        lines("""
        And then they saw it: the sea, as wide as the sky.
        They dug a hole under the cross. In it was a box, and in the box lay {a note that said, "Well done!"|an old \
            {thing}|a handful of coins}.
        {Ahis} {kin} stood at the gate and waved. "How you have grown!"
        """),
        lines("""
        {A} was tired but {happy}. "The best part was the road," {Ahe} said.
        They stayed until the end of the summer.
        They brought home sand in their shoes and a great many stories.
        """),
    ),
    (  # an evening at the movies
        lines("""
        {when}, {A} and {B} had saved enough money for the movies. The film was called "{title}".
        The old theater in town was going to close, and {A} was {sad}, because {Ahe} had seen {Ahis} first film there.
        {A}'s {kin} worked in a small theater and showed films about {premise}.
        """),
        lines("""
        {A} wanted to see a {genre}, but {B} wanted to see a {genre}. They argued all the way.
        They bought {popcorn|two lemonades|a bag of nuts} and sat down in the first row. The lights went out.
        The film was about {premise}. {B} held {A}'s hand during the dark parts.
        """),
        lines("""
        But in the middle of the film the screen went black. "Oh!" cried everyone.
        Behind them sat the {elder}, who {laughed louder than anyone|slept and snored|knew every line by heart}.
        When the hero was in danger, {A} jumped up and {said}, "Look out behind you!"
        """),
        lines("""
        So {A} stood up and told the rest of the story {Ahimself}, and it was even better than the film.
        {B} went to the man with the projector and helped him {mend it|find the cable|change the lamp}.
        ? "Sit down," whispered {B}, but {Bhe} was smiling.
        """),
        lines("""
        At the end the whole theater {clapped|cheered|was silent, and then everybody clapped}.
        On the way home they talked about nothing else. {A} thought it was {adj4}, and {B} said that it was {dg3}.
        "I did not like it," said {B}. "It was {adj1}." "I loved it," said {A}. They were friends all the same.
        """),
    ),
    (  # a quarrel
        lines("""
        {A} and {B} had built a {tree house|snowman|sand castle|dam|raft} together.
        {A} and {B} both wanted the {thing}.
        {when}, {A} and {B} had a quarrel, and afterwards neither knew how it had begun.
        """),
        lines("""
        "It is mine!" {said} {A}. "No, it is mine!" {said} {B}. They pulled and pulled until it broke in two.
        {B} wanted to paint it {color}, but {A} wanted another color. Neither would give in.
        "Then I will play alone," {said} {A}, and went home {slowly}.
        """),
        lines("""
        Now nobody had anything to play with. {A} sat at {place}, and {B} sat at home.
        It was boring without {B}. {A} tried to play {game} alone, but that does not work.
        ? "Why is {B} not here today?" asked {Ahis} {kin}. {A} said nothing.
        """),
        lines("""
        Then {A} had an idea. {Ahe} wrote a note: "I am sorry. Come to {place} at five."
        "One of you has to begin," said the {elder}.
        After three days {B} stood at the door with {some {food}|a {thing}|a bunch of flowers}. "I am sorry," {Bhe} \
            said.
        """),
        lines("""
        "I am sorry too," said {A}. They looked at each other and had to laugh.
        They shook hands and built a new one, bigger than the first.
        From then on they took turns, and it was twice as much fun.
        """),
    ),
)

NEW_FRIEND = PLOTS[1]

ENDINGS = lines("""
    And that is how it was.
    They lived happily ever after.
    That night {A} slept well.
    It was a day that {A} would never forget.
    "Can we do that again tomorrow?" asked {A}.
    {A} smiled and closed {Ahis} eyes.
    Outside, {weather}.
    And if you go to {place}, you may still see them there.
""")
