package openaibatch

import (
	"encoding/json"
	"strings"
	"testing"
)

// The tokens of a batch are those of its answers, whatever their operation names them. Those of reasoning are not
// counted, but OpenAI's clients need the member.
func TestTokensOfABatchAreThoseOfItsAnswers(t *testing.T) {
	t.Parallel()
	var r results
	for line, usage := range []string{
		`{"prompt_tokens":10,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}`,
		`{"input_tokens":20,"output_tokens":6,"input_tokens_details":{"cached_tokens":16}}`,
	} {
		r.succeed(line+1, "c", 7, json.RawMessage(`{"usage":`+usage+`}`))
	}
	b := batchRow{In: r.in, Cached: r.cached, Out: r.out}
	text, err := json.Marshal(b.object())
	if err != nil {
		t.Fatal(err)
	}
	const want = `"usage":{"input_tokens":30,"input_tokens_details":{"cached_tokens":24},"output_tokens":10,` +
		`"output_tokens_details":{"reasoning_tokens":0},"total_tokens":40}`
	if !strings.Contains(string(text), want) {
		t.Errorf("got %s, want %s in it", text, want)
	}
}

// Answers that are read in one statement are few where they are large.
func TestAnswersAreReadInBoundedGroups(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		stored []int
		want   int
	}{
		{nil, 0},
		{[]int{10, 10, 10}, 3},
		{[]int{storedBytesMax, 10}, 1},
		{[]int{storedBytesMax - 1, 10, 10}, 2},
		{[]int{64 << 20, 64 << 20}, 1},
	} {
		lines := make([]endedLine, len(c.stored))
		for i, n := range c.stored {
			lines[i].Stored = n
		}
		if got := atOnce(lines); got != c.want {
			t.Errorf("%v: %d at once, want %d", c.stored, got, c.want)
		}
	}
}
