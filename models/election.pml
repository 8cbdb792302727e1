/*
 * The lease of the elected leader, under pauses of processes, lost answers and jumps of the database's clock.
 *
 * The model follows takeSQL, renewSQL, resignSQL and holds_term. The lease is a row with a growing term and the incarnation of its
 * holder. A take-over locks the row FOR UPDATE SKIP LOCKED; the holder itself may take it again at any time, for it may not know of
 * its term: the answer to the take-over was lost, or it trusts its term no more. Renewals and resignations wait for a take-over, and
 * for nothing else. The duties of a leader are a process of their own: each write is a transaction that locks the row of its term
 * FOR KEY SHARE, also after the leader has lost the term or resigned. A process may be stopped between any two of its steps for any
 * time, which interleaving covers. The clock moves forwards by itself, and jumps.
 *
 * Claims are checked:
 *   terms are in order   no write of a term is committed after the take-over of a later term was
 *   progress             a row whose holder is gone is taken, whatever the clock did
 *
 * Variants, each of which has to violate one of the claims:
 *   UNHELD         a write reads the row of its term without a lock
 *   OWN_CLOCK      a write relies on the time of its last renewal, and reads no row
 *   SAME_TERM      a take-over does not draw a new term
 *   OWN_UNHELD     a holder takes its row again without the lock of a take-over
 *   NO_FUTURE      a row that was renewed in the future is not free (the clock was set back)
 */

#ifndef LEADERS
#define LEADERS 2
#endif
#define POLLS  2         /* of each leader; renewals count as well */
#define WRITES 1         /* of the duties of the first leader; of others their take-overs alone matter */
#define LEASE 1
#define NOON  2          /* the clock begins here, so that it can be set back */
#define LAST  4

byte clock = NOON;
byte jumps = 0;

byte term = 1;           /* the committed row; process 1 was elected before */
byte holder = 1;
byte renewed = NOON;
bool resigned = 0;       /* renewed_at is null */
bool row_updated = 0;    /* FOR UPDATE */
byte row_shared  = 0;    /* holders of FOR KEY SHARE */
byte takeovers = 0;      /* committed; the model's own count, which no process reads */

/* What the duties of each leader know: its term, the take-over that began it, and until when the leader trusts it. */
byte led[LEADERS + 1];
byte began[LEADERS + 1];
byte until[LEADERS + 1];

#define LAPSED (resigned || renewed + LEASE <= clock)

#ifdef NO_FUTURE
#define FREE LAPSED
#else
#define FREE (LAPSED || renewed > clock + LEASE)
#endif

#ifdef OWN_UNHELD
#define UNLOCKED (holder == id || (!row_updated && row_shared == 0))
#else
#define UNLOCKED (!row_updated && row_shared == 0)
#endif

#ifdef OWN_CLOCK
#define REMEMBER until[id] = clock + LEASE
#else
#define REMEMBER skip
#endif

proctype leader(byte id; byte my_term) {
	byte polls, won, number;

	do
	/* A follower polls. */
	:: my_term == 0 && polls < POLLS ->
		atomic {
			polls++;
			if
			:: (FREE || holder == id) && UNLOCKED -> row_updated = 1; won = 1
			:: else -> won = 0
			fi
		};
		if
		:: won ->
			d_step {                                       /* commit */
#ifndef SAME_TERM
				term++;
#endif
				takeovers++;
				won = term;
				number = takeovers;
				holder = id;
				renewed = clock;
				resigned = 0;
				row_updated = 0
			};
			if
			:: d_step { my_term = won; led[id] = won; began[id] = number; REMEMBER; won = 0; number = 0 }
			:: d_step { won = 0; number = 0 }              /* the answer is lost */
			fi
		:: else
		fi
	/* The leader renews, or finds that its term is over. */
	:: my_term != 0 && polls < POLLS ->
		atomic {
			!row_updated;                                  /* it waits for a take-over, and reads the row again */
			polls++;
			if
			:: term == my_term && !LAPSED -> renewed = clock; REMEMBER
			:: else -> my_term = 0; led[id] = 0
			fi
		}
	/* It resigns, trusts its term no more, or dies and leaves the row. */
	:: my_term != 0 ->
		if
		:: atomic {
			!row_updated;
			if :: term == my_term -> resigned = 1 :: else fi;
			my_term = 0; led[id] = 0
		   }
		:: d_step { my_term = 0; led[id] = 0 }
		:: break
		fi
	:: my_term == 0 -> break
	od
}

/* The duties of a leader write within its term. One that has begun goes on when the term is over. */
proctype duties(byte id) {
	byte writes, its, number;
	bool holds;

	do
	:: writes < WRITES && led[id] != 0 ->
		d_step { writes++; its = led[id]; number = began[id] };
#if defined(OWN_CLOCK)
		holds = (clock < until[id]);
#elif defined(UNHELD)
		holds = (term == its && !LAPSED);
#else
		atomic {
			!row_updated;                                  /* FOR KEY SHARE waits for a take-over, and reads the row again */
			holds = (term == its && !LAPSED);
			if :: holds -> row_shared++ :: else fi
		};
#endif
		if
		:: holds ->
			d_step {                                       /* commit */
				assert(number == takeovers);               /* terms are in order */
#if !defined(OWN_CLOCK) && !defined(UNHELD)
				row_shared--;
#endif
				holds = 0
			}
		:: else
		fi;
		d_step { its = 0; number = 0 }
	:: break
	od
}

proctype database_clock() {
	do
	:: clock < LAST -> clock++
	:: jumps < 1 -> d_step { jumps++; clock = LAST }
	:: jumps < 1 -> d_step { jumps++; clock = 0 }
	:: break
	od
}

init {
	byte i;
	atomic {
		led[1] = 1;
		until[1] = NOON + LEASE;
		run leader(1, 1);
		run duties(1);
		for (i : 2 .. LEADERS) { run leader(i, 0) };
		run database_clock()
	};
	_nr_pr == 1;
	assert(row_shared == 0 && !row_updated);
	/* Progress: no holder is left, so that the row is free, or will be after the time of one lease by this clock. */
	i = 0;
	do
	:: FREE -> break
	:: else -> d_step { i++; clock++ }; assert(i <= 2 * LEASE)
	od
}
