// Counts the entries that this process handles, and says when its step is over; the counterpart of ../tally.go.
// In a shared step the parent says so, of which told is the promise; say sends it a line.
const progressEvery = 5; // ms

export function newTally(shared, told, say) {
  const done = Promise.withResolvers();
  const tally = { handled: 0, expected: -1, isOver: false, over: done.promise, add, expect, close: () => {} };
  const finish = () => {
    tally.isOver = true;
    done.resolve();
  };
  function add(count) {
    tally.handled += count;
    if (!shared && tally.expected >= 0 && tally.handled >= tally.expected) finish();
  }
  function expect(count) {
    tally.expected = count;
    add(0);
  }
  if (shared) follow(tally, told, say, finish);
  return tally;
}

function follow(tally, told, say, finish) {
  let last = "";
  const tell = () => {
    const now = JSON.stringify({ progress: { handled: tally.handled, expected: tally.expected } });
    if (now !== last) say(now);
    last = now;
  };
  const timer = setInterval(tell, progressEvery);
  tally.close = () => clearInterval(timer);
  told.then(finish);
}
