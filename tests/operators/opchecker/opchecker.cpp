// Stands in for the ATB library's checker of operators: the same torch class, on a CPU.
// Softmax changes from one time to the next, RmsNorm is wrong, KvCache works in place.
#include <torch/script.h>

struct OperationTorch : torch::CustomClassHolder {
  std::string name, param;
  explicit OperationTorch(std::string given) : name(std::move(given)) {}
  void set_param(std::string given) { param = std::move(given); }
  std::vector<at::Tensor> execute(std::vector<at::Tensor> in) {
    TORCH_CHECK(!param.empty(), "set_param was not called");
    if (name == "LinearOperation") {
      TORCH_CHECK(param.find("\"hasBias\": false") != std::string::npos, "param: ", param);
      return {at::matmul(in[0].to(at::kFloat), in[1].to(at::kFloat).t()).to(in[0].scalar_type())};
    }
    if (name == "SoftmaxOperation") {
      return {(at::softmax(in[0].to(at::kFloat), -1) * (1 + 0.1 * at::rand({}))).to(in[0].scalar_type())};
    }
    if (name == "RmsNormOperation") return {in[0] * 2};
    if (name == "ElewiseOperation") return {in[0] + in[1]};
    TORCH_CHECK(false, name, " is not in this library");
  }
};

TORCH_LIBRARY(OperationTorch, m) {
  m.class_<OperationTorch>("OperationTorch")
      .def(torch::init<std::string>())
      .def("set_param", &OperationTorch::set_param)
      .def("execute", &OperationTorch::execute);
}
