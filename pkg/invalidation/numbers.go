package invalidation

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

const (
	// digitsMax and exponentMax bound the numbers in JSON that is taken in. A float64 has 17 digits and
	// reaches 1e308; beyond that, a few bytes of JSON become up to 147 kB of text each time that the database
	// writes the number out.
	digitsMax   = 100
	exponentMax = 308
)

// CheckNumbers returns an error that matches ErrInvalid if JSON text has a number of more than 100 digits, or
// one whose magnitude is beyond 1e308 or, unless it is zero, below 1e-308. It does not check the text
// otherwise.
func CheckNumbers(text []byte) error {
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '"':
			i = stringEnd(text, i)
		case c == '-' || c >= '0' && c <= '9':
			end := i + 1
			for end < len(text) && strings.IndexByte("0123456789+-.eE", text[end]) >= 0 {
				end++
			}
			if !readable(text[i:end]) {
				return fmt.Errorf("number %.20s... at byte %d has more than %d digits, or is beyond 1e%d or below "+
					"1e-%d; give it as a text: %w",
					text[i:end], i, digitsMax, exponentMax, exponentMax, ErrInvalid)
			}
			i = end
		default:
			i++
		}
	}
	return nil
}

// stringEnd is the index behind the JSON string that begins at i.
func stringEnd(text []byte, i int) int {
	for i++; i < len(text) && text[i] != '"'; i++ {
		if text[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// readable reports whether a number is within the bounds. Text that is no number is left to the JSON parser.
func readable(number []byte) bool {
	mantissa, exponent := number, 0
	at := bytes.IndexAny(number, "eE")
	if at >= 0 {
		mantissa = number[:at]
		n, err := strconv.Atoi(string(bytes.TrimPrefix(number[at+1:], []byte("+"))))
		if err != nil {
			n = 2 * exponentMax // no number, or one of very many digits
		}
		exponent = n
	}
	mantissa = bytes.TrimPrefix(mantissa, []byte("-"))
	whole, fraction, _ := bytes.Cut(mantissa, []byte("."))
	if len(whole)+len(fraction) > digitsMax {
		return false
	}
	first, magnitude := leadingDigit(whole, fraction)
	if first < 0 { // zero, whose exponent must be within the bounds as well: 0e-16383 is long as text
		return exponent >= -exponentMax && exponent <= exponentMax
	}
	magnitude += exponent
	if magnitude == exponentMax { // 1e308 itself is the largest
		return isOne(whole, fraction)
	}
	return magnitude >= -exponentMax && magnitude < exponentMax
}

// leadingDigit returns the first digit of a decimal that is not zero and the power of ten that it counts; -1 for zero.
func leadingDigit(whole, fraction []byte) (digit, power int) {
	if rest := bytes.TrimLeft(whole, "0"); len(rest) > 0 {
		return int(rest[0] - '0'), len(rest) - 1
	}
	if rest := bytes.TrimLeft(fraction, "0"); len(rest) > 0 {
		return int(rest[0] - '0'), len(rest) - len(fraction) - 1
	}
	return -1, 0
}

// isOne reports whether the digits of a decimal are a one and zeros.
func isOne(whole, fraction []byte) bool {
	ones := bytes.Count(whole, []byte("1")) + bytes.Count(fraction, []byte("1"))
	zeros := bytes.Count(whole, []byte("0")) + bytes.Count(fraction, []byte("0"))
	return ones == 1 && ones+zeros == len(whole)+len(fraction)
}

// checkNumbers checks the payloads and callbacks of pushes.
func checkNumbers(pushes []Push) error {
	for i := range pushes {
		if err := CheckNumbers(pushes[i].Payload); err != nil {
			return fmt.Errorf("payload of entry %d: %w", i+1, err)
		}
		if err := CheckNumbers(pushes[i].Callback); err != nil {
			return fmt.Errorf("callback of entry %d: %w", i+1, err)
		}
	}
	return nil
}
