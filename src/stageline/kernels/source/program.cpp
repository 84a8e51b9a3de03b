// Runs recorded calls one after the other, without a way back to Python in between; program.py records them.
#include <cstdint>

// A call of a function and its arguments, one word each.
struct Step {
    void (*call)(const int64_t* words);
    const int64_t* words;
};

// An argument that differs from run to run.
struct Variable {
    int64_t* word;
    int64_t place_in_values;
};

extern "C" __attribute__((visibility("default"))) void stageline_run_program(
    const Step* steps, int64_t num_steps, const Variable* variables, int64_t num_variables, const int64_t* values) {
    for (int64_t i = 0; i < num_variables; i++) *variables[i].word = values[variables[i].place_in_values];
    for (int64_t i = 0; i < num_steps; i++) steps[i].call(steps[i].words);
}
