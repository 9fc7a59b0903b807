"""Problems of our own with the oddities of Geometry3K, GSM8K and MATH, for machines without those data sets.

Each list names the oddity that its rows have. tests/data_sets.py writes them to files and states what they count.
"""

from __future__ import annotations

from typing import NamedTuple


class Diagram(NamedTuple):
    """A row of Geometry3K. Rows with the same ``picture`` show the same diagram."""

    picture: int
    problem: str
    answer: str


class Worked(NamedTuple):
    """A row of MATH."""

    problem: str
    answer: str
    level: str = "3"
    subject: str = "Algebra"


GEOMETRY3K_TRAIN = [
    # plain numbers, a rounded decimal, and text outside of ASCII
    Diagram(0, "The legs of the right triangle are 9 and 12. Find the hypotenuse.", "15"),
    Diagram(1, "Find $x$ to the nearest tenth if $\\tan x = 0.5$ in degrees.", "26.6"),
    Diagram(2, "▱KLMN has one angle of 112 degrees. What is the measure of ∠N, if ∠K is opposite?", "68"),
    Diagram(3, "AB ∥ CD, and the slopes differ by a sign if one is read from the right. Find the slope.", "- 6"),
    # a line break within or behind the text, and blanks behind it
    Diagram(4, "In $\\odot P, R S=24, T U=24,$ and $m \\widehat{R S}=70$\r\nFind $m\\widehat{T U}$", "70"),
    Diagram(5, "Find $y$ so that $AB \\parallel CD$. AE = 8, EB = 4, CE = y, ED = 5.\r\n", "10"),
    Diagram(6, "Find $m \\angle Q R S$ ", "41"),
    # spaced LaTeX
    Diagram(7, "Find the height of the equilateral triangle of side 10.", "5 \\sqrt { 3 }"),
    Diagram(8, "Find $\\sin A$ for the sides 3, 8 as they are drawn.", "\\frac { 3 } { 8 }"),
    Diagram(9, "The legs are $\\sqrt{8}$ and $\\sqrt{11}$. Find the hypotenuse.", "\\sqrt { 19 }"),
    Diagram(10, "Find the circumference of a circle of radius 4.5.", "9 \\pi"),
    Diagram(11, "Find $z$.", "\\frac { 4 \\sqrt { 2 } } { 7 }"),
    Diagram(12, "The square has a side of 5. Find its diagonal.", "5 \\sqrt 2"),
    Diagram(13, "Find the height of the equilateral triangle of side 5.", "\\frac { 5 } { 2 } \\sqrt { 3 }"),
    Diagram(14, "Find the perimeter.", "31 + 6 \\sqrt { 2 } + 4 \\sqrt { 3 }"),
    Diagram(15, "Find the length of the arc.", "\\frac { \\pi } { 6 }"),
    Diagram(16, "Find the exact area.", "49 - 12 \\pi"),
    Diagram(17, "Find $\\cos B$.", "\\sqrt { 21 } / 21"),
    Diagram(18, "Find the exact circumference.", "7 \\sqrt 3 \\pi"),
    # no number
    Diagram(19, "Name two congruent angles.", "\\angle 2 \\cong \\angle 5"),
    Diagram(20, "What is the ratio of the sides?", "3:4"),
    Diagram(21, "What is the ratio of the areas?", "\\frac { \\sqrt 3 } { 5 } : 1"),
    Diagram(22, "Which relation holds?", "a + c = 90"),
    Diagram(23, "Express the third angle.", "p + q - 180"),
    Diagram(24, "Is the triangle isosceles?", "not enough information"),
    # one diagram with two questions, and a row that is there twice
    Diagram(7, "Find the area of the equilateral triangle of side 2.", "\\sqrt { 3 }"),
    Diagram(12, "The square has a side of 5. Find its area.", "25"),
    Diagram(20, "What is the ratio of the sides?", "3:4"),
]

GEOMETRY3K_VALIDATION = [
    Diagram(0, "The legs of the right triangle are 5 and 12. Find the hypotenuse.", "13"),
    Diagram(1, "Find the area to the nearest hundredth.", "48.25"),
    Diagram(2, "If ∠1 is 118, what is the measure of ∠2?\r\nBoth lie on one line.", "62"),
    # the answers of these fifteen are rewritten: they have blanks around symbols, or \\frac
    Diagram(3, "Find $x$ ", "- 1"),
    Diagram(4, "Find the height.", "7 \\sqrt { 13 }"),
    Diagram(5, "Find $\\sin D$.", "\\frac { 41 } { 6 }"),
    Diagram(6, "Find the hypotenuse.", "\\sqrt { 226 }"),
    Diagram(7, "Find the circumference.", "12 \\pi"),
    Diagram(8, "Find the perimeter.", "22 + 5 \\sqrt { 2 } + 3 \\sqrt { 3 }"),
    Diagram(9, "Find the perimeter of the quadrilateral.", "3 \\sqrt 6 + 4 \\sqrt { 14 }"),
    Diagram(10, "Find $w$.", "\\frac { 15 \\sqrt 2 } { 4 }"),
    Diagram(11, "Express the area.", "18 y^2 - 6 y"),
    Diagram(12, "What must hold for $x$?", "x < 50"),
    Diagram(13, "Name a pair of alternate angles.", "\\angle 3 and \\angle 7"),
    Diagram(14, "Find the side.", "3.5 \\sqrt { 3 }"),
    Diagram(15, "Find the arc.", "\\frac { 7 } { 5 } \\pi"),
    Diagram(16, "Find the ratio.", "50 / 3"),
    Diagram(9, "Find the longest side of the quadrilateral.", "4 \\sqrt { 14 }"),
]

GSM8K_TRAIN = [
    ("A hut at noon has 4 degrees. By night it is 11 degrees colder.  How many degrees has it then?", "-7"),
    ("A city’s library lends 1,250,000 books a year. How many does it lend in 8 years?", "10000000"),
    ("Renée buys 3 coffees at €4 each and pays with a €20 note. How many euros does she get back?", "8"),
    ("A tank holds 6 m³ of water, and 5 of them stand in a row. How many m³ do they hold together?", "30"),
    ("“How many stamps?” asked Ivo. “Twice as many as you,” said Ada. Ivo has 17. How many has Ada?", "34"),
    ("A shop takes 25% off a coat of $60.  How many dollars does the coat cost now?", "45"),
    ("A train of 12\u00a0cars has 40 seats in each car. Half of the seats are taken. How many are free?", "240"),
    ("Mina has no marbles left after she gave 5 to each of 3 friends. How many marbles has she now?", "0"),
]

GSM8K_TEST = [
    ("A diver is at the surface and goes down 6 metres, then 4 more. At how many metres is she?", "-10"),
    ("A farm sells 1,500 eggs a week for 20 weeks.  How many eggs does it sell?", "30000"),
    ("Zoë’s rope is 18 metres. She cuts off a third. How many metres are left?", "12"),
    ("A ticket costs £7, and a family buys 4 with a £2 discount in all. How many pounds do they pay?", "26"),
]

_ASY = "[asy]\ndefaultpen(linewidth(0.8));\ndraw((0,0)--(5,0)--(5,3)--cycle);\n"

MATH12K_TRAIN = [
    Worked("Write $\\frac{9}{21}$ in lowest terms.", "\\frac{3}{7}"),
    Worked("What is $\\frac{1}{9}-\\frac{5}{9}$?", "-\\frac{4}{9}", "1", "Prealgebra"),
    Worked("What is $2.5^2$?", "6.25", "?", "Prealgebra"),
    Worked("Find the missing angle of a triangle with $90^\\circ$ and $52^\\circ$.", "38^\\circ", "2", "Geometry"),
    Worked("Simplify $\\sqrt{325}$.", "5\\sqrt{13}"),
    Worked("Find the distance from $(0,0)$ to $(2,5)$.", "\\sqrt{29}"),
    Worked("Where do $x=3$ and $y=-8$ meet?", "(3,-8)"),
    Worked("Which day comes after Sunday?", "\\text{Monday}", "1", "Number Theory"),
    Worked("Find the area of an ellipse with half-axes $3$ and $7$.", "21\\pi", "4", "Precalculus"),
    Worked("Write $0.6$ as a fraction.", "\\frac35"),
    Worked("Write $3 \\div 7$ as a fraction.", "\\frac 37"),
    Worked("What is $2184 \\cdot 100$?", "218,\\!400", "1", "Prealgebra"),
    Worked("Rationalise $\\frac{1}{\\sqrt{7}}$.", "\\frac{\\sqrt{7}}{7}"),
    Worked("Write $13$ in base $6$.", "21_6", "2", "Number Theory"),
    Worked("Write $147$ in base $5$.", "1042_{5}", "3", "Number Theory"),
    Worked("Ana has $5$ coins and finds $3$. How many coins has she?", "8\\text{ coins}", "1", "Prealgebra"),
    Worked("Simplify $2\\sqrt{126}$.", "6 \\sqrt{14}"),
    Worked("$23$ of $100$ doors are open. What percent is that?", "23\\%", "1", "Prealgebra"),
    Worked("Which is even: (A) 3, (B) 4, (C) 5?", "\\text{(B)}", "1", "Number Theory"),
    Worked("Find the circumference of a circle of radius $7$.", "14 \\pi", "2", "Geometry"),
    Worked("What is $527 \\cdot 100$?", "52,700", "1", "Prealgebra"),
    Worked("Write $22.5^\\circ$ in radians.", "\\frac{\\pi}{8}", "2", "Precalculus"),
    Worked("A price of $\\$6341$ is halved. What is it now?", "\\$3170.50", "2", "Prealgebra"),
    Worked("What is $512$ times $\\$100$?", "\\$51200", "2", "Prealgebra"),
    Worked("Which letter comes after B?", "C", "1", "Counting & Probability"),
    Worked("Simplify $\\frac{10\\sqrt{3}}{8}$.", "\\frac{5 \\sqrt{3}}{4}"),
    Worked("Simplify $\\sqrt{-169}$.", "13i", "3", "Intermediate Algebra"),
    Worked("What is $-\\frac{\\sqrt{12}}{8}$, simplified?", "-\\frac{\\sqrt{3}}{4}"),
    Worked("How much is three times a million?", "3,\\!000,\\!000", "1", "Prealgebra"),
    Worked("Add the vectors $(2,0)$ and $(3,-2)$.", "\\begin{pmatrix} 5 \\\\ -2 \\end{pmatrix}", "2", "Precalculus"),
    Worked(
        "Divide by $7$: $\\begin{pmatrix} 2 & 7 \\\\ 0 & -3 \\end{pmatrix}$.",
        "\\begin{pmatrix} \\frac{2}{7} & 1 \\\\ 0 & -\\frac{3}{7} \\end{pmatrix}",
        "4",
        "Precalculus",
    ),
    Worked("Which $x$ have $x \\ge 3$?", "[3,\\infty)"),
    Worked("Where is $\\frac{1}{x+5}$ defined?", "(-\\infty,-5)\\cup(-5,\\infty)", "4", "Intermediate Algebra"),
    Worked("Where is $0 < x < 25$ and $x \\ne 7$?", "(0,7) \\cup (7,25)", "4", "Intermediate Algebra"),
    Worked("How far is half of five miles?", "2.5\\mbox{ miles}", "1", "Prealgebra"),
    Worked("A board is $60$ cm by $30$ cm. Find its area.", "1800 \\mbox{ cm}^2", "2", "Geometry"),
    Worked("Find the area of a $15$ by $5$ rectangle.", "75\\text{ square\nunits}", "2", "Geometry"),
    Worked("Write $7.4$ as a mixed number.", "7\\frac{2}{5}", "2", "Prealgebra"),
    Worked("Write $39$ inches in feet.", "3\\frac{1}{4}\\text{ feet}", "2", "Prealgebra"),
    Worked("Solve $(x-2)^2 = 11$.", "2 \\pm \\sqrt{11}", "3", "Intermediate Algebra"),
    Worked("Where does $3x - 7 = y$ meet the $x$-axis?", "\\left(\\frac{7}{3},0\\right)"),
    Worked("What is half of $-\\frac{5}{6}$?", "-\\dfrac{5}{12}", "2", "Prealgebra"),
    Worked("Solve $x - 4 = 5$.", "x=9", "1"),
    Worked("Solve $2k = -15$.", "k = \\frac{-15}{2}", "1"),
    Worked("Find the line of slope $-3$ through $(0,4)$.", "y=-3x+4"),
    Worked("Find all $x$ with $x^2 = 25$, smaller first.", "-5, 5"),
    Worked("Sort $17$, $-31$, $4$ and $-62$.", "-62, -31, 4, 17", "1", "Prealgebra"),
    Worked("Which side is opposite of $Z$ in the triangle $XYZ$?", "XY", "1", "Geometry"),
    Worked("What is $61 \\cdot 30$?", "\\mathbf{1830}", "1", "Prealgebra"),
    Worked("Which positive number has the fourth power $5$?", "\\sqrt[4]{5}"),
    Worked("What is $1$ more than the cube root of $4$?", "1 + \\sqrt[3]{4}"),
    Worked("Simplify $\\sqrt{720p^5}$.", "12p^2 \\sqrt{5p}"),
    Worked("What do $10$ of $\\$34.27$ cost?", "\\$ 342.70", "1", "Prealgebra"),
    Worked("What is $-7 \\div 4$?", "-\\frac{7}{4}.", "1", "Prealgebra"),
    Worked("Find half of a right angle.", "45^\\circ.", "1", "Geometry"),
    Worked("In what ratio are $35$ and $14$?", "5:2", "1", "Prealgebra"),
    Worked("Five minutes before half past seven, after noon?", "7\\!:\\!25 \\text{ p.m.}", "1", "Prealgebra"),
    Worked("Write $42.5\\%$ as a decimal.", ".425", "1", "Prealgebra"),
    Worked("Write $3.18 \\cdot 10^{-5}$ as a decimal.", ".0000318", "2", "Prealgebra"),
    Worked("Which primes divide $30$?", "2, 3, \\text{ and } 5", "1", "Number Theory"),
    Worked("Simplify $\\sqrt{15}$.", "\\!\\sqrt{15}"),
    Worked("  What is $8 + 9$? Do not write $\\boxed{}$.  \n", "17", "1", "Prealgebra"),
    Worked("What is $9 - 6$?\n\n[asy]\ndraw((0,0)--(1,0));\n[/asy]", "3", "1", "Prealgebra"),
    # longer than the 2048 tokens that the recipe has for words, at a token per byte
    Worked(f"How many triangles are drawn?\n{_ASY * 40}[/asy]", "40", "5", "Geometry"),
    Worked(f"How many sides has each figure?\n{_ASY * 60}[/asy]", "3", "5", "Geometry"),
]

MATH500_TEST = [
    Worked("What is $4 + 5 \\cdot 6$?", "34", "1", "Prealgebra"),
    Worked("What is $3 - 45$?", "-42", "1", "Prealgebra"),
    Worked("Write a right angle in degrees.", "90^\\circ", "1", "Geometry"),
    Worked("Who is taller, Edith or Greta, if Edith is not?", "\\text{Greta}", "1", "Prealgebra"),
    Worked("Write $44$ in base $9$.", "48_9", "2", "Number Theory"),
    Worked("What is $5 \\div 4$?", "1.25", "1", "Prealgebra"),
    Worked("Simplify $\\sqrt{153}$.", "3\\sqrt{17}"),
    Worked("Which is odd: (A) 3, (B) 4?", "\\text{(A)}", "1", "Number Theory"),
    Worked("Write $0.00005$ times $1.5$ as a decimal.", ".000075", "2", "Prealgebra"),
    Worked("Simplify $r^2 \\cdot 7r^3$.", "7r^5"),
    Worked("Solve $x + 6 = 11$.", "x=5", "1"),
    Worked("How far does the wheel roll?\n[asy]\ndraw(circle((0,0), 1/2));\n[/asy]", "\\pi", "2", "Geometry"),
    # the answers of these sixteen are rewritten
    Worked("Write $\\frac{34}{6}$ in lowest terms.", "\\frac{17}{3}", "1", "Prealgebra"),
    Worked("Write the opposite of $\\frac{37}{9}$.", "-\\frac{37}{9}", "1", "Prealgebra"),
    Worked("Simplify $\\sqrt{9800}$.", "70 \\sqrt{2}"),
    Worked("Subtract $2i$ from $8 - 5i$.", "8 - 7i", "2", "Intermediate Algebra"),
    Worked("Write $1.4$ as a fraction.", "\\frac75", "1", "Prealgebra"),
    Worked("Write $4 \\div 9$ as a fraction.", "\\frac 49", "1", "Prealgebra"),
    Worked("Simplify $\\frac{1}{\\sqrt{5}}$.", "\\frac{\\sqrt{5}}{5}"),
    Worked("Find the area of a circle of radius $12$.", "144 \\pi", "2", "Geometry"),
    Worked("Where is $0 < x < 49$ and $x \\ne 16$?", "(0,16) \\cup (16,49)", "4", "Intermediate Algebra"),
    Worked("Write $(0,4)$ in polar form.", "\\left( 4, \\frac{\\pi}{2} \\right)", "2", "Precalculus"),
    Worked("What is $v$ less than $u$?", "u - v", "1"),
    Worked("Which complex number has real part $-3$ and imaginary part $8$?", "-3 + 8i", "2", "Precalculus"),
    Worked("Find the foot.", "\\left( \\frac{3}{2}, -5, \\frac{1}{2} \\right)", "5", "Precalculus"),
    Worked("Factor $x^2 - 9$.", "(x - 3)(x + 3)", "2"),
    Worked("Find the column.", "\\begin{pmatrix} 7 \\\\ -4 \\end{pmatrix}", "2", "Precalculus"),
    Worked("Write $8 \\div 16$ as a fraction.", "\\frac{8}{16}", "1", "Prealgebra"),
]
