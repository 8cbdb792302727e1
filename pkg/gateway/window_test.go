package gateway

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/penstock/penstock/pkg/worker"
)

// Whatever the sizes of the reads are, the pieces are the answer, and the window has its end.
func TestUnracedWindowHasTheEndOfWhatWasRead(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	for range 300 {
		answer := make([]byte, random.IntN(60_000))
		for i := range answer {
			answer[i] = byte(random.Uint32())
		}
		var from io.Reader = bytes.NewReader(answer)
		if random.IntN(2) == 0 {
			from = &uneven{from, random}
		}
		if random.IntN(2) == 0 {
			from = iotest.DataErrReader(from)
		}
		var w window
		w.open(int64(random.IntN(4_000)) - 1)
		var all []byte
		for {
			piece, err := w.read(from)
			all = append(all, piece...)
			if want := all[max(0, len(all)-tailBytes):]; !bytes.Equal(w.tail(), want) {
				t.Fatalf("behind %d bytes the tail has %d, want %d", len(all), len(w.tail()), len(want))
			}
			if errors.Is(err, io.EOF) {
				break
			}
		}
		if !bytes.Equal(all, answer) {
			t.Fatalf("the pieces have %d bytes, want %d", len(all), len(answer))
		}
		w.close()
		w.close()
	}
}

// uneven is a reader that brings less than it could.
type uneven struct {
	io.Reader
	random *rand.Rand
}

func (u *uneven) Read(p []byte) (int, error) {
	most := []int{1, 300, 2_100, 20_000}[u.random.IntN(4)]
	return u.Reader.Read(p[:min(len(p), 1+u.random.IntN(most))])
}

func TestUsageIsTheLastOneWithCounts(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][2]int64{
		`{"usage":{"prompt_tokens":3,"completion_tokens":2}}`:                                     {3, 2},
		`{"usage": {"input_tokens" : 7, "x":{"output_tokens":9}, "output_tokens":1 } }`:           {7, 1},
		`{"usage":{"prompt_tokens":3}} {"usage":null}`:                                            {3, 0},
		`{"usage":{"prompt_tokens":3}} {"usage":{"prompt_tokens":4}}`:                             {4, 0},
		`{"usage":{"prompt_tokens":"3"}}`:                                                         {0, 0},
		`{"usage":{"prompt_tokens":-3}}`:                                                          {0, 0},
		`{"usage":{"prompt_tokens":9223372036854775807,"completion_tokens":9223372036854775807}}`: {worker.TokensMax, worker.TokensMax},
		`{"usage":{"prompt_tokens":3`:                                                             {0, 0},
		`{"usage":`:                                                                               {0, 0},
		`{}`:                                                                                      {0, 0},
		`{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":4},"total_tokens":9}}`: {5, 0},
	} {
		var w window
		w.open(-1)
		if _, err := w.read(bytes.NewReader([]byte(text))); err != nil {
			t.Fatal(err)
		}
		if in, out := w.usage(); in != want[0] || out != want[1] {
			t.Errorf("%s: got %d, %d, want %v", text, in, out, want)
		}
	}
}

// Servers that rank documents write the counts first, and the documents behind them. Objects within the answer are
// not its own.
func TestUnracedUsageAtTheBeginningOfALongAnswerIsRead(t *testing.T) {
	t.Parallel()
	const usage = `{"id":"x","usage":{"prompt_tokens":56,"total_tokens":56}`
	documents := `"results":[{"text":"` + strings.Repeat("d", 3*tailBytes) + `"}]}`
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	for range 100 {
		for text, want := range map[string]int64{
			usage + "," + documents:                                                             56,
			`{"id":{"usage":{"prompt_tokens":9}},` + documents:                                  0,
			usage + "," + documents[:len(documents)-1] + `,"usage":{"prompt_tokens":7}}`:        7,
			`{"text":"` + strings.Repeat("d", tailBytes/2) + `",` + usage[1:] + "," + documents: 56,
			usage + `,"results":"` + strings.Repeat("d", tailBytes) + `"}`:                      56,
			"data: " + usage + "," + documents:                                                  0,
		} {
			var w window
			w.open(int64(random.IntN(4_000)) - 1)
			from := &uneven{strings.NewReader(text), random}
			for err := error(nil); err == nil; {
				_, err = w.read(from)
			}
			if in, out := w.usage(); in != want || out != 0 {
				t.Errorf("%.40s...: got %d, %d, want %d", text, in, out, want)
			}
			w.close()
		}
	}
}
